// A canvas knows no variables and no light-dark(): the browser resolves them on an element.

const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

/** The CSS colour `text` as it is in the theme of this moment: `rgb(…)`. */
export function colour(text) {
  probe.style.color = text;
  return getComputedStyle(probe).color;
}
