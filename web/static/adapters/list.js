// The list's order follows its choice at once; without scripts there is a button.

const tools = document.getElementById("list-tools");
tools.querySelector("[data-go]").hidden = true;
tools.elements.sort.addEventListener("change", () => tools.requestSubmit());
tools.addEventListener("submit", () => {
  for (const input of tools.querySelectorAll("input, select")) input.disabled = !input.value || (input.name === "sort" && input.value === "name");
});
addEventListener("pageshow", () => tools.querySelectorAll("input, select").forEach((input) => (input.disabled = false)));
