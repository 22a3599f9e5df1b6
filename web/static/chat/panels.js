// The panels at the sides: beside the columns where there is room, over them on a narrow screen.

const narrow = matchMedia("(max-width: 1100px)");
const panels = [...document.querySelectorAll(".chat-side")];

/** Show or hide a panel; on a wide screen that is remembered. */
export function togglePanel(panel, open = panel.hidden) {
  panel.hidden = !open;
  for (const button of document.querySelectorAll(`[data-toggle="${panel.id}"][aria-expanded]`)) button.setAttribute("aria-expanded", String(open));
  if (!narrow.matches) localStorage.setItem(`panel/${panel.id}`, open ? "open" : "closed");
  else if (open) panel.querySelector("button").focus();
}

/** Close what lies over the columns. Returns whether something did. */
export function uncover() {
  const over = narrow.matches ? panels.filter(({ hidden }) => !hidden) : [];
  for (const panel of over) togglePanel(panel, false);
  return over.length > 0;
}

document.addEventListener("click", ({ target }) => {
  const button = target.closest("[data-toggle]");
  if (button) togglePanel(document.getElementById(button.dataset.toggle));
  else if (!target.closest(".chat-side, dialog")) uncover();
});

if (!narrow.matches) {
  for (const panel of panels) {
    const kept = localStorage.getItem(`panel/${panel.id}`) ?? (panel.hasAttribute("data-open") ? "open" : "closed");
    togglePanel(panel, kept === "open");
  }
}
