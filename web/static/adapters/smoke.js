// Adding and removing smoke prompts and their messages. Fields are named by their places: p0.m1.content.

const form = document.getElementById("smoke-form");
const fresh = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);

/** Name everything by where it stands now. */
function renumber() {
  const prompts = [...form.querySelectorAll("[data-prompt]")];
  prompts.forEach((prompt, index) => {
    prompt.querySelector("[data-number]").textContent = index + 1;
    prompt.setAttribute("aria-label", `Prompt ${index + 1}`);
    for (const input of prompt.querySelectorAll("[name$='.must_match'], [name$='.max_tokens']")) {
      const [, field] = input.name.split(".");
      input.name = `p${index}.${field}`;
      input.id = `f-p${index}.${field}`;
      const box = input.closest(".field");
      box.querySelector("label").htmlFor = input.id;
      box.querySelector(".hint")?.setAttribute("id", `${input.id}-hint`);
      if (box.querySelector(".hint")) input.setAttribute("aria-describedby", `${input.id}-hint`);
    }
    [...prompt.querySelectorAll("[data-message]")].forEach((message, at) => {
      message.querySelector("select").name = `p${index}.m${at}.role`;
      message.querySelector("textarea").name = `p${index}.m${at}.content`;
    });
  });
  form.querySelector("[data-add-prompt]").disabled = prompts.length >= Number(form.dataset.max);
}

form?.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button || button.type !== "button") return;
  const prompt = button.closest("[data-prompt]");
  let added = null;
  if (button.dataset.remove) button.closest(button.dataset.remove).remove();
  else if ("addMessage" in button.dataset) prompt.querySelector("[data-messages]").append((added = fresh("message-template")));
  else if ("addPrompt" in button.dataset) form.querySelector("[data-prompts]").append((added = fresh("prompt-template")));
  else return;
  renumber();
  added?.querySelector("textarea").focus();
});
