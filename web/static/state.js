/** Say in `place` how a live part is: a dot of a `kind` (ok, warn, bad) and `words`. */
export function tellState(place, kind, words) {
  place.replaceChildren(Object.assign(document.createElement("span"), { className: `dot dot-${kind}` }), ` ${words}`);
}
