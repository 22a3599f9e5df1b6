// Copying, also where browsers offer no clipboard: they do over TLS and on localhost alone.

/** Put `text` on the clipboard. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const before = document.activeElement;
  const area = Object.assign(document.createElement("textarea"), { value: text, className: "visually-hidden" });
  (document.querySelector("dialog[open]") ?? document.body).append(area); // what is outside of an open dialog is inert
  area.select();
  document.execCommand("copy");
  area.remove();
  before?.focus();
}
