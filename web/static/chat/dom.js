// Nodes out of the page's templates, and copying.
import { copyText } from "../copy.js";

/** The element of `<template id>`, with each of `texts` in its element `data-<name>`. */
export function fromTemplate(id, texts = {}) {
  const element = document.getElementById(id).content.cloneNode(true).firstElementChild;
  for (const [name, text] of Object.entries(texts)) part(element, name).textContent = text;
  return element;
}

/** The element with `data-<name>` below `element`, or the element itself. */
export const part = (element, name) => (element.matches(`[data-${name}]`) ? element : element.querySelector(`[data-${name}]`));

/** Put `text` on the clipboard and say so on the button. */
export async function copyBy(button, text) {
  await copyText(text);
  button.classList.add("copied");
  const label = button.getAttribute("aria-label");
  if (label !== "Copied") {
    button.setAttribute("aria-label", "Copied");
    setTimeout(() => {
      button.classList.remove("copied");
      button.setAttribute("aria-label", label);
    }, 1600);
  }
}

/** Let the browser save `text` as a file. */
export function download(name, type, text) {
  const link = Object.assign(document.createElement("a"), { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href));
}
