// The dialog that shows a request as code.

import { copyBy } from "./dom.js";
import { CODE } from "./request.js";

const dialog = document.getElementById("chat-code");
const text = document.getElementById("chat-snippet");
const languages = document.getElementById("chat-languages");

document.getElementById("chat-copy-code").addEventListener("click", ({ currentTarget }) => copyBy(currentTarget, text.textContent));

/** `request` has `model`, `messages` and `sampling`. */
export function showSnippet(request, language = Object.keys(CODE)[0]) {
  text.textContent = CODE[language](location.origin, request);
  languages.replaceChildren(...Object.keys(CODE).map((name) => choice(name, name === language, request)));
  if (!dialog.open) dialog.showModal();
}

function choice(name, chosen, request) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: name });
  button.setAttribute("aria-pressed", String(chosen));
  button.addEventListener("click", () => {
    showSnippet(request, name);
    languages.querySelector("[aria-pressed=true]").focus();
  });
  return button;
}
