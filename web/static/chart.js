// Charts out of <figure data-chart> (the macro `chart`). Its data is
//   { x: [seconds since the epoch], series: [{ label, values, color?: 1..8, dashed? }], unit?, kind?: "line" | "area" | "bars" | "steps" }
// with x in rising order and null for what is unknown. With `labels` (texts) in place of x it is a bar chart of categories.
// `empty` is what is written where there is nothing to draw.
// `draw(figure, data)` replaces the data, as live pages do.
import { bytes } from "./bytes.js";
import { colour } from "./colour.js";

const DASH = [4, 4];
const SHORT_UNITS = new Set(["ms", "s", "%", "bytes"]); // the others stand in the legend alone
const DAY_S = 86400;

/** Texts of the time axis: hours, and the date where days are what counts. */
function times(_, at, __, ___, step) {
  const day = (seconds) => new Date(seconds * 1000).toLocaleDateString(undefined, { month: "short", day: "numeric" });
  const hour = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  return at.map((seconds) => (step >= DAY_S || (step > 3600 && hour(seconds) === "00:00") ? day(seconds) : hour(seconds)));
}
const token = (name) => colour(`var(--${name})`);
const faint = (rgb, share) => rgb.replace(/^rgba?\(([^)]+)\)$/, (_, parts) => `rgba(${parts.split(",").slice(0, 3).join(",")}, ${share})`);

export function format(value, unit = "") {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (unit === "bytes") return bytes(value);
  if (unit === "ms" && size >= 1000) return `${trim(value / 1000)} s`;
  if (unit === "%") return `${trim(value)} %`;
  const short = size >= 1e9 ? `${trim(value / 1e9)}G` : size >= 1e6 ? `${trim(value / 1e6)}M` : size >= 1e4 ? `${trim(value / 1e3)}k` : trim(value);
  return unit ? `${short} ${unit}` : short;
}
const trim = (value) => String(Number(value.toPrecision(3)));

const plots = new WeakMap();

/** Places of values without a neighbour: a line does not show them. */
const alone = (values) => values.flatMap((value, at) => (value != null && values[at - 1] == null && values[at + 1] == null ? [at] : []));

function options(figure, data, place) {
  const ink = token("ink-soft"), line = token("line");
  const bars = data.kind === "bars" || data.labels;
  const axis = { stroke: ink, font: "12px system-ui", grid: { stroke: line, width: 1 }, ticks: { show: false } };
  return {
    width: place.clientWidth, height: place.clientHeight, legend: { show: false },
    padding: [8, 18, 0, 0], // the last time of the axis reaches out
    cursor: { points: { size: 6 }, drag: { x: false, y: false }, sync: data.labels ? undefined : { key: "console" } },
    scales: { x: { time: !data.labels, range: data.labels ? (_, low, high) => [low - 0.5, high + 0.5] : undefined },
              y: { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.08 : 1] } },
    axes: [
      { ...axis, size: 30, space: 64, values: times, grid: { show: false }, ...(data.labels ? { splits: () => data.labels.map((_, i) => i), values: (_, at) => at.map((i) => data.labels[i] ?? ""), space: 20 } : {}) },
      { ...axis, size: (_, texts) => 16 + 7 * Math.max(2, ...(texts ?? []).map((text) => text.length)), values: (_, at) => at.map((value) => format(value, SHORT_UNITS.has(data.unit) ? data.unit : "")) },
    ],
    series: [{}, ...data.series.map((one, at) => {
      const stroke = token(`c${one.color ?? (at % 8) + 1}`);
      return {
        label: one.label, stroke, width: bars ? 0 : 1.75, dash: one.dashed ? DASH : undefined, spanGaps: false,
        points: bars ? { show: false } : { show: true, size: 5, width: 0, fill: stroke, filter: (plot, index) => alone(plot.data[index]) },
        fill: bars ? faint(stroke, 0.8) : data.kind === "area" ? faint(stroke, 0.16) : undefined,
        paths: bars ? uPlot.paths.bars({ size: [0.72, 46], radius: 0.12 }) : data.kind === "steps" ? uPlot.paths.stepped({ align: 1 }) : undefined,
      };
    })],
    hooks: { setLegend: [(plot) => legend(figure, data, plot.cursor.idx)] },
  };
}

function legend(figure, data, at) {
  const list = figure.querySelector(".chart-legend");
  const shown = data.series.map((one, index) => {
    const item = document.createElement("li"), swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = `var(--c${one.color ?? (index % 8) + 1})`;
    const last = at ?? one.values.findLastIndex((value) => value !== null);
    item.append(swatch, `${one.label} ${data.labels && at === undefined ? "" : format(one.values[last], data.unit)}`.trim());
    return item;
  });
  if (at !== null && at !== undefined) {
    const when = document.createElement("li");
    when.textContent = data.labels ? data.labels[at] : new Date(data.x[at] * 1000).toLocaleString();
    shown.push(when);
  }
  list.replaceChildren(...shown);
}

function table(place, data) {
  const head = ["", ...data.series.map((one) => one.label)];
  const xs = data.labels ?? data.x.map((at) => new Date(at * 1000).toLocaleString());
  const made = document.createElement("table");
  made.className = "data";
  const row = (cells, tag) => {
    const line = document.createElement("tr");
    cells.forEach((text, at) => {
      const cell = document.createElement(tag === "th" || at === 0 ? "th" : "td");
      cell.scope = tag === "th" ? "col" : "row";
      if (at) cell.className = "num";
      cell.textContent = text || (data.labels ? "Value" : "Time");
      line.append(cell);
    });
    return line;
  };
  made.createTHead().append(row(head, "th"));
  const order = xs.map((_, at) => at);
  if (!data.labels) order.reverse(); // the newest first
  made.createTBody().append(...order.map((at) => row([xs[at], ...data.series.map((one) => format(one.values[at], data.unit))], "td")));
  place.replaceChildren(made);
}

/** Show `data` in a figure, in place of what it showed. */
export function draw(figure, data) {
  const place = figure.querySelector(".chart-plot"), held = plots.get(figure);
  plots.set(figure, { ...held, data });
  const xs = data.labels ? data.labels.map((_, at) => at) : data.x;
  const any = data.series.some((one) => one.values.some((value) => value !== null));
  if (!figure.querySelector(".chart-table").hidden) table(figure.querySelector(".chart-table"), data);
  const form = JSON.stringify([data.series.map((one) => [one.label, one.color]), data.labels, data.unit, data.kind, any]);
  if (held?.plot && held.form === form) {
    held.plot.setData([xs, ...data.series.map((one) => one.values)]);
  } else {
    held?.plot?.destroy();
    place.replaceChildren();
    let plot = null;
    if (any) plot = new uPlot(options(figure, data, place), [xs, ...data.series.map((one) => one.values)], place);
    else place.append(Object.assign(document.createElement("div"), { className: "none", textContent: data.empty ?? "Nothing in this time" }));
    plots.set(figure, { data, plot, form });
  }
  legend(figure, data);
}

function redraw() {
  for (const figure of document.querySelectorAll("[data-chart]")) {
    const held = plots.get(figure);
    if (held) plots.set(figure, { ...held, form: "" }), draw(figure, held.data);
  }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-chart-table]");
  if (!button) return;
  const figure = button.closest("[data-chart]"), place = figure.querySelector(".chart-table");
  place.hidden = !place.hidden;
  figure.querySelector(".chart-plot").hidden = !place.hidden;
  button.setAttribute("aria-pressed", String(!place.hidden));
  if (!place.hidden) table(place, plots.get(figure).data);
});
document.addEventListener("themechange", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const { plot } = plots.get(target.closest("[data-chart]")) ?? {};
    if (plot && target.clientWidth) plot.setSize({ width: target.clientWidth, height: target.clientHeight });
  }
});
for (const figure of document.querySelectorAll("[data-chart]")) {
  const given = figure.querySelector('script[type="application/json"]');
  if (given) draw(figure, JSON.parse(given.textContent));
  sizes.observe(figure.querySelector(".chart-plot"));
}
