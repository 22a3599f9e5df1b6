// The canary page: the slider's number, and the comparison of both versions, renewed while the page is looked at.

import { draw } from "../chart.js";
import { tellTimes } from "../console.js";

const RENEW_MS = 10_000;
const slider = document.getElementById("f-percent");
const told = slider?.parentElement.querySelector("output");
const tell = () => told && (told.textContent = `${slider.value} %`);
slider?.addEventListener("input", tell);
tell();

document.addEventListener("click", (event) => {
  const step = event.target.closest("[data-percent]");
  if (!step) return;
  slider.value = step.dataset.percent;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
});

const place = document.getElementById("canary-figures");

/** New numbers in the place of the old ones; charts are redrawn as they are, tables stay open. */
async function renew() {
  if (document.hidden) return;
  const response = await fetch(place.dataset.renew);
  if (!response.ok) return;
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
  const table = fresh.querySelector("section");
  if (!table) return location.reload(); // the canary has ended, or was taken back
  place.querySelector("section").replaceWith(table);
  tellTimes(place);
  for (const figure of fresh.querySelectorAll("[data-chart]")) {
    const shown = document.getElementById(figure.id);
    if (shown) draw(shown, JSON.parse(figure.querySelector('script[type="application/json"]').textContent));
  }
}

if (place.dataset.renew) {
  setInterval(() => renew().catch(() => {}), RENEW_MS);
  document.addEventListener("visibilitychange", () => renew().catch(() => {}));
}
