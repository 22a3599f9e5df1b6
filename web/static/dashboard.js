// A dashboard that follows: its charts from the roll-ups every so often, the figures of this moment from an event stream.
import { draw, format } from "./chart.js";
import { tellState } from "./state.js";

const board = document.getElementById("dashboard");
const text = (id, value) => {
  const place = document.querySelector(`#${id} [data-value]`);
  if (place && place.textContent !== value) place.textContent = value;
};

async function fill(url) {
  const response = await fetch(url, { headers: { accept: "application/json" } }).catch(() => null);
  if (!response?.ok) return; // the next round may
  const { charts, facts } = await response.json();
  for (const [id, data] of Object.entries(charts)) {
    const figure = document.getElementById(id);
    if (figure) draw(figure, data);
  }
  for (const [id, value] of Object.entries(facts)) text(`fact-${id}`, value);
}
// A table that takes long comes when the page stands; the server has made it inert, as it makes pages.
async function place(part) {
  const response = await fetch(part.dataset.url).catch(() => null);
  if (!response?.ok) return;
  const made = new DOMParser().parseFromString(await response.text(), "text/html");
  part.replaceChildren(...made.body.childNodes);
  part.removeAttribute("aria-busy");
}
for (const part of board.querySelectorAll("#top[data-url]")) place(part);

function refresh() {
  fill(board.dataset.url);
  if (board.dataset.engines) fill(board.dataset.engines);
}
if (board.dataset.engines) fill(board.dataset.engines);
const every = Number(board.dataset.refreshS) * 1000;
if (every) setInterval(() => document.visibilityState === "visible" && refresh(), every);

const state = document.getElementById("live-state");
const tell = (kind, words) => tellState(state, kind, words);

const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);

function show({ total, engines, gateways, gateways_up: up }) {
  tell(up < gateways ? "warn" : "ok", up < gateways ? `live, ${gateways - up} of ${gateways} gateways silent` : "live");
  text("live-completion", format(total.completion_tokens_per_s));
  text("live-prompt", format(total.prompt_tokens_per_s));
  text("live-open", format(total.open));
  text("live-refused", format(60 * Object.values(total.refusals_per_s).reduce((a, b) => a + b, 0)));
  if (!engines.length) return;
  text("live-running", format(sum(engines, "running")));
  text("live-waiting", format(sum(engines, "waiting")));
  text("live-hbm", format(sum(engines, "adapters_hbm")));
  const pages = sum(engines, "pages_total");
  text("live-pool", pages ? format(100 * (1 - sum(engines, "pages_free") / pages)) : "–");
}

if (board.dataset.live) {
  let source = null;
  const follow = () => {
    if (document.visibilityState !== "visible" || source) return;
    source = new EventSource(board.dataset.live);
    source.addEventListener("now", (event) => show(JSON.parse(event.data)));
    source.addEventListener("signed-out", () => location.reload());
    source.addEventListener("error", () => tell("warn", "connecting again"));
  };
  // A page that nobody sees costs the server nothing.
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") return follow();
    source?.close();
    source = null;
  });
  follow();
}

for (const form of document.querySelectorAll("[data-submit-on-change]")) form.addEventListener("change", () => form.requestSubmit());
