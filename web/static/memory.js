// The pool of one engine, drawn page by page and asked for again every two seconds while somebody looks.
import { api } from "./api.js";
import { colour } from "./colour.js";
import { tellState } from "./state.js";

const POLL_MS = 2000;
const HEIGHT_PX = 420; // at most; pages shrink to fit
const MAX_ROWS = 200;
const SHADES = 6;
const KINDS = { adapter: "adapter", kv: "keys and values", cached: "prefix cache", quarantined: "waiting for a step", free: "free" };

const map = document.getElementById("map"), canvas = map.querySelector("canvas"), tip = document.getElementById("map-tip");
const pen = canvas.getContext("2d");
const state = { version: "", total: 0, owners: [], counts: [], at: new Uint32Array(0), chosen: null, cursor: null, grid: null };

/** One number of 0 to SHADES - 1 for a name, the same on every visit. */
function shade(name) {
  let hash = 2166136261;
  for (const character of name) hash = Math.imul(hash ^ character.codePointAt(0), 16777619);
  return (hash >>> 0) % SHADES;
}

function paints(owners) {
  const known = new Map();
  const paint = (text) => known.get(text) ?? known.set(text, colour(text)).get(text);
  return owners.map((owner) => {
    const mixed = (base, name) => paint(`color-mix(in oklab, var(--${base}) ${100 - 11 * shade(name)}%, var(--surface))`);
    if (owner.kind === "adapter") return mixed("c1", owner.digest ?? "");
    if (owner.kind === "kv") return mixed("c2", owner.tenant ?? "");
    if (owner.kind === "cached") return paint("color-mix(in srgb, var(--c6) 45%, var(--surface))");
    return paint(owner.kind === "quarantined" ? "var(--line-strong)" : "var(--sunken)");
  });
}

function name(owner) {
  if (owner.kind === "adapter") return owner.adapter ? `${owner.tenant}/${owner.adapter}@${owner.version}` : `deleted version ${owner.digest.slice(0, 12)}`;
  if (owner.kind === "kv") return owner.tenant ?? "a deleted tenant";
  return KINDS[owner.kind] ?? owner.kind;
}

function layOut() {
  const width = map.clientWidth, ratio = devicePixelRatio || 1;
  let size = Math.max(2, Math.min(16, Math.floor(Math.sqrt((width * HEIGHT_PX) / Math.max(state.total, 1)))));
  const columns = Math.max(1, Math.floor(width / size)), rows = Math.ceil(state.total / columns) || 1;
  canvas.style.height = `${rows * size}px`;
  canvas.width = width * ratio;
  canvas.height = rows * size * ratio;
  state.grid = { size, columns, gap: size >= 5 ? 1 : 0, ratio };
}

function paint() {
  if (!state.total) return;
  layOut();
  const { size, columns, gap, ratio } = state.grid, fills = paints(state.owners), pinned = colour("var(--c3)");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  for (let page = 0; page < state.total; page++) {
    const owner = state.at[page], x = (page % columns) * size, y = Math.floor(page / columns) * size;
    pen.globalAlpha = state.chosen === null || state.chosen === owner ? 1 : 0.18;
    pen.fillStyle = fills[owner];
    pen.fillRect(x, y, size - gap, size - gap);
    if (state.owners[owner].pinned) {
      pen.fillStyle = pinned;
      pen.fillRect(x, y, Math.max(1, (size - gap) / 2.5), Math.max(1, (size - gap) / 2.5));
    }
  }
  pen.globalAlpha = 1;
  if (state.cursor !== null) {
    pen.strokeStyle = colour("var(--ink)");
    pen.lineWidth = 2;
    pen.strokeRect((state.cursor % columns) * size - 1, Math.floor(state.cursor / columns) * size - 1, size + 1, size + 1);
  }
}

function point(page) {
  state.cursor = page;
  paint();
  if (page === null) return (tip.hidden = true);
  const { size, columns } = state.grid, owner = state.owners[state.at[page]];
  const line = (text, className) => Object.assign(document.createElement("div"), { textContent: text, className });
  const held = `${KINDS[owner.kind] ?? owner.kind}${owner.pinned ? ", pinned" : ""}${owner.shared ? `, shared by ${owner.shared} more` : ""}`;
  tip.replaceChildren(line(name(owner), ""), line(owner.kind in { adapter: 1, kv: 1 } ? held : "", "muted small"), line(`page ${page}, ${state.counts[state.at[page]]} of them`, "muted small"));
  tip.hidden = false;
  const x = (page % columns) * size + size, y = Math.floor(page / columns) * size + size;
  tip.style.left = `${Math.max(0, Math.min(x + 6, map.clientWidth - tip.offsetWidth))}px`;
  tip.style.top = `${y + 6}px`;
}

canvas.addEventListener("pointermove", (event) => {
  if (!state.grid) return;
  const { size, columns } = state.grid, page = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
  const inside = Math.floor(event.offsetX / size) < columns && page < state.total;
  if ((inside ? page : null) !== state.cursor) point(inside ? page : null);
});
canvas.addEventListener("pointerleave", () => point(null));
canvas.addEventListener("blur", () => point(null));
canvas.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: state.grid?.columns, ArrowUp: -state.grid?.columns }[event.key];
  if (!step || !state.total) return;
  event.preventDefault();
  point(Math.max(0, Math.min(state.total - 1, state.cursor === null ? 0 : state.cursor + step)));
});

function tell(id, value) {
  document.querySelector(`#map-${id} [data-value]`).textContent = value;
}

function list() {
  const wanted = document.getElementById("map-search").value.trim().toLowerCase();
  const order = state.owners.map((_, at) => at).filter((at) => name(state.owners[at]).toLowerCase().includes(wanted));
  order.sort((a, b) => state.counts[b] - state.counts[a]);
  document.getElementById("map-owners").replaceChildren(...order.slice(0, MAX_ROWS).map((at) => {
    const owner = state.owners[at], row = document.createElement("tr");
    row.dataset.at = at;
    row.tabIndex = 0;
    row.setAttribute("aria-selected", String(state.chosen === at));
    const cells = [name(owner), KINDS[owner.kind] + (owner.pinned ? ", pinned" : ""), state.counts[at].toLocaleString(), `${((100 * state.counts[at]) / state.total).toFixed(1)} %`];
    row.append(...cells.map((text, column) => Object.assign(document.createElement("td"), { textContent: text, className: column > 1 ? "num" : column ? "muted" : "name" })));
    return row;
  }));
}

function choose(event) {
  const row = event.target.closest("tr[data-at]");
  if (!row || (event.type === "keydown" && event.key !== "Enter" && event.key !== " ")) return;
  event.preventDefault();
  const at = Number(row.dataset.at);
  state.chosen = state.chosen === at ? null : at;
  list();
  document.querySelector(`#map-owners tr[data-at="${at}"]`)?.focus();
  paint();
}
document.getElementById("map-owners").addEventListener("click", choose);
document.getElementById("map-owners").addEventListener("keydown", choose);
document.getElementById("map-search").addEventListener("input", list);

function take(view) {
  const key = (owner) => JSON.stringify([owner.kind, owner.tenant, owner.digest]);
  const chosen = state.chosen === null ? null : key(state.owners[state.chosen]);
  Object.assign(state, { version: view.version, total: view.total, owners: view.owners, counts: view.owners.map(() => 0) });
  state.at = new Uint32Array(view.total);
  let page = 0;
  for (let run = 0; run < view.runs.length; run += 2) {
    const owner = view.runs[run], length = view.runs[run + 1];
    state.at.fill(owner, page, page + length);
    state.counts[owner] += length;
    page += length;
  }
  const again = view.owners.findIndex((owner) => key(owner) === chosen);
  state.chosen = again < 0 ? null : again;
  if (state.cursor !== null && state.cursor >= view.total) state.cursor = null;
  canvas.hidden = !view.total;
  const share = (kind) => view.owners.reduce((sum, owner, at) => sum + (owner.kind === kind ? state.counts[at] : 0), 0);
  tell("total", view.total.toLocaleString());
  for (const kind of ["free", "kv", "cached", "adapter"]) tell(kind, view.total ? ((100 * share(kind)) / view.total).toFixed(1) : "–");
  list();
  state.cursor === null ? paint() : point(state.cursor);
}

function report(kind, words) {
  tellState(document.getElementById("map-state"), kind, words);
}

let shown = "";
async function poll() {
  if (document.visibilityState === "visible") {
    try {
      const view = await api(`/engines/${map.dataset.engine}/pages?since=${state.version}`);
      if (view.runs) take(view);
      if (shown !== "ok") report("ok", "live");
      shown = "ok";
    } catch (error) {
      if (shown !== error.message) report("bad", error.message);
      shown = error.message;
    }
  }
  setTimeout(poll, POLL_MS);
}
poll();
document.addEventListener("themechange", paint);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
new ResizeObserver(paint).observe(map);
