// The upload page: choosing files, sending them, and what the server found in them.

import { api, ApiError } from "../api.js";
import { bytes } from "../bytes.js";
import { ARCHIVE, CONFIG, WEIGHTS, choose, dropped, nameFrom } from "./files.js";
import { records, Transfer } from "./transfer.js";

const form = document.getElementById("upload");
const { tenant, home } = form.dataset;
const limits = { total: Number(form.dataset.maxBytes), config: Number(form.dataset.maxConfigBytes) };
const NAME = /^[a-z0-9][a-z0-9._-]{0,62}$/;
const $ = (selector) => form.querySelector(selector);
const name = $("[name=adapter]"), drop = $(".drop"), list = $("#upload-files"), problem = $("#upload-problem");
const told = document.getElementById("upload-told"), unfinished = document.getElementById("upload-unfinished");

let chosen = null; // { parts, problems, left }
let picking = null; // the record of an unfinished upload whose files are asked for
let transfer = new Transfer(tenant, show);

const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

// --- choosing ---

function take(files, folder = "") {
  if (transfer.state !== "paused" || transfer.record) return;
  if (!files.length) return;
  chosen = choose(files, limits);
  if (picking) return pickUp(picking);
  if (!name.value && !name.readOnly) name.value = nameFrom(folder || (chosen.parts[0]?.name === ARCHIVE ? chosen.parts[0].file.name : ""));
  check();
  list.replaceChildren(...chosen.parts.map(({ name: part, file }) => row(part, file.name, file.size)), ...leftOut());
  buttons();
}

function leftOut() {
  if (!chosen.left.length || !chosen.parts.length) return [];
  const some = chosen.left.slice(0, 3).join(", ");
  return [make("li", { className: "small muted wrap-any", textContent: `Not sent: ${some}${chosen.left.length > 3 ? ` and ${chosen.left.length - 3} more` : ""}` })];
}

/** Shows what stands in the way; whether nothing does. */
function check() {
  const bad = name.value && !NAME.test(name.value) ? "Use 1 to 63 of a-z 0-9 . _ -, starting with a letter or digit." : "";
  tellField(bad);
  problem.hidden = !chosen?.problems[""];
  problem.textContent = chosen?.problems[""] ?? "";
  return Boolean(chosen?.parts.length && name.value && !bad && !Object.keys(chosen.problems).length);
}

function tellField(text) {
  const at = $("#upload-name-error");
  at.textContent = text;
  at.hidden = !text;
  if (text) name.setAttribute("aria-invalid", "true");
  else name.removeAttribute("aria-invalid");
}

function row(part, shown, size) {
  const item = make("li", { className: "upload-file" });
  item.dataset.part = part;
  const state = make("span", { className: "small muted num", textContent: bytes(size) });
  state.dataset.state = "";
  item.append(make("div", { className: "spread" }, make("strong", { className: "mono wrap-any", textContent: shown }), state));
  item.append(make("progress", { max: Math.max(size, 1), value: 0, hidden: true, ariaLabel: `Progress of ${shown}` }));
  if (chosen?.problems[part]) item.append(make("p", { className: "error small bad", textContent: chosen.problems[part] }));
  return item;
}

for (const input of form.querySelectorAll("input[type=file]")) {
  input.addEventListener("change", () => {
    take([...input.files], input.files[0]?.webkitRelativePath.split("/")[0]);
    input.value = ""; // the same choice again is a change again
  });
}
form.addEventListener("click", (event) => {
  const pick = event.target.closest("[data-pick]");
  if (pick) $(`#${pick.dataset.pick}`).click();
});
for (const kind of ["dragenter", "dragover"]) drop.addEventListener(kind, (event) => (event.preventDefault(), drop.classList.add("over")));
for (const kind of ["dragleave", "drop"]) drop.addEventListener(kind, () => drop.classList.remove("over"));
drop.addEventListener("drop", async (event) => {
  event.preventDefault();
  const { files, folder } = await dropped(event.dataTransfer);
  take(files, folder);
});
for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault()); // a missed drop must not leave the page
name.addEventListener("input", () => (check(), buttons()));

// --- sending ---

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (transfer.state === "done" || transfer.state === "failed") return again();
  if (transfer.record) return void transfer.resume();
  if (!check()) return void (name.value || (tellField("is needed"), name.focus()));
  const promote = { yes: true, no: false }[$("[name=promote]").value] ?? null;
  transfer.begin(name.value, { assert_base: $("[name=assert_base]").checked, promote }, chosen.parts);
});

/** The page as it was before anything was chosen; the name stays. */
function again() {
  transfer = new Transfer(tenant, show);
  chosen = picking = null;
  list.replaceChildren();
  document.getElementById("upload-result").hidden = true;
  told.textContent = "";
  check();
  buttons();
}

const acts = {
  pause: () => transfer.pause(),
  cancel: async () => {
    await transfer.cancel();
    again();
  },
};
form.addEventListener("click", (event) => acts[event.target.closest("[data-act]")?.dataset.act]?.());

function buttons() {
  const { state, record } = transfer, sending = state === "sending", running = sending || state === "checking";
  const start = $("[data-act=start]");
  start.hidden = running;
  start.disabled = !record && state === "paused" && !(chosen?.parts.length && !Object.keys(chosen.problems).length);
  start.querySelector("[data-label]").textContent = { done: "Upload another", failed: "Start over" }[state] ?? (record ? "Resume" : "Upload");
  $("[data-act=pause]").hidden = !sending;
  $("[data-act=cancel]").hidden = !(sending || (state === "paused" && record));
  const fixed = running || record !== null || state === "failed";
  $("#upload-choice").disabled = fixed;
  drop.hidden = fixed;
}

function show({ state, files, error, record }) {
  for (const file of files) {
    const item = list.querySelector(`[data-part="${file.name}"]`);
    if (!item) continue;
    const bar = item.querySelector("progress"), done = file.sent === file.size;
    bar.hidden = done && state !== "sending";
    bar.value = file.sent;
    item.querySelector("[data-state]").textContent =
      state === "checking" ? "being checked" : state === "done" ? `${bytes(file.size)}, accepted` : done ? `${bytes(file.size)}, sent` : `${bytes(file.sent)} of ${bytes(file.size)}`;
  }
  told.textContent = { sending: "Sending", checking: "The server is checking the adapter", paused: record ? "Paused" : "" }[state] ?? "";
  problem.hidden = true;
  if (error) fault(error, state);
  if (state === "done") success(transfer.result);
  buttons();
}

/** The whole-line message of an error; findings go to their files. */
function fault(error, state) {
  const known = error instanceof ApiError;
  if (known && error.param === "name") return tellField(error.message.replace(/^name: /, ""));
  problem.hidden = false;
  const refused = known && error.code === "invalid_adapter";
  problem.textContent = refused ? `This adapter cannot be served: ${count(error.details.findings.length, "finding")}. Nothing of it was kept.`
    : known ? error.message
    : `The connection was lost (${error.message}). What has arrived is kept; resume when it is back.`;
  if (state === "failed" && known && error.status === 404) problem.textContent = "The server no longer has this upload. Start over.";
  if (refused) findings(error.details);
  problem.scrollIntoView({ block: "nearest" });
}

const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

/** Which file a finding is about: tensors are in the weights, fields in the config. */
function placeOf(field) {
  if (list.querySelector(`[data-part="${ARCHIVE}"]`)) return ARCHIVE;
  if (field === CONFIG || field === WEIGHTS) return field;
  return field.includes(".lora_") || field.startsWith("base_model.") || field === "__metadata__" || field.split(".").length > 2 ? WEIGHTS : CONFIG;
}

function findings({ findings: found, modules = [] }) {
  for (const item of list.querySelectorAll("[data-part]")) {
    const mine = found.filter((one) => one.field && placeOf(one.field) === item.dataset.part);
    item.querySelector("[data-state]").textContent = mine.length ? count(mine.length, "finding") : "nothing found here";
    item.classList.toggle("upload-refused", mine.length > 0);
    if (mine.length) item.append(faults(mine));
  }
  const general = found.filter((one) => !one.field);
  if (general.length) list.append(make("li", { className: "upload-file upload-refused" }, faults(general)));
  if (modules.length) list.append(make("li", { className: "small muted" }, "Fits all the same: ", ...modules.map(module)));
}

function faults(found) {
  const made = make("ul", { className: "upload-findings" });
  made.append(...found.map(({ field, message }) => make("li", {}, ...(field ? [make("code", { className: "wrap-any", textContent: field }), " "] : []), message)));
  return made;
}

const module = ({ name: projection, layers, ranks }) =>
  make("span", { className: "chip", textContent: `${projection} · ${count(layers, "layer")} · r ${ranks.join(", ")}` });

function success({ version, created, promoted, modules }) {
  const place = document.getElementById("upload-result"), [adapter] = version.version.split("@");
  const at = `${home}/adapters/${adapter}`;
  place.querySelector("h2").textContent = created ? `${version.version} is ready` : `${version.version} has this content already`;
  place.querySelector("[data-what]").textContent = promoted || version.aliases.includes("prod")
    ? "prod points at it: requests get it within a second."
    : "No request gets it until an alias points at it.";
  const facts = { Ranks: version.ranks.join(", "), Size: bytes(version.size_bytes), Digest: version.digest.slice(0, 12) };
  place.querySelector("dl").replaceChildren(...Object.entries(facts).flatMap(([key, value]) => [make("dt", { textContent: key }), make("dd", { textContent: value, className: key === "Digest" ? "mono" : "" })]),
    make("dt", { textContent: "Modules" }), make("dd", { className: "row" }, ...(modules.length ? modules.map(module) : version.target_modules.map((one) => make("span", { className: "chip", textContent: one })))));
  place.querySelector("[data-open]").href = `${at}/versions/${version.number}`;
  place.querySelector("[data-adapter]").href = at;
  place.hidden = false;
  place.querySelector("h2").focus();
}

// --- what an earlier visit left unfinished ---

async function offer() {
  for (const record of records.of(tenant)) {
    const view = await api(`/tenants/${encodeURIComponent(tenant)}/uploads/${record.id}`).catch((error) => (error.status === 404 ? null : undefined));
    if (view === null) records.drop(tenant, record.id);
    if (view) unfinished.append(offered(record, view));
  }
}

function offered(record, view) {
  const total = record.files.reduce((sum, file) => sum + file.size, 0), have = Object.values(view.received_bytes).reduce((sum, size) => sum + size, 0);
  const text = make("span", {}, "The upload of ", make("strong", { textContent: record.adapter }), ` was interrupted at ${bytes(have)} of ${bytes(total)}. `,
    record.sha256 ? "All of it has arrived." : `Choose ${record.files.map((file) => file.shown).join(" and ")} again to go on.`);
  const go = make("button", { type: "button", className: "btn btn-small", textContent: record.sha256 ? "Finish it" : "Choose the files" });
  const discard = make("button", { type: "button", className: "btn btn-small btn-quiet", textContent: "Discard it" });
  const line = make("div", { className: "notice notice-warn" }, text, make("span", { className: "row push" }, go, discard));
  go.addEventListener("click", () => {
    name.value = record.adapter;
    if (record.sha256) return pickUp(record);
    picking = record;
    $("#upload-pick").click();
  });
  discard.addEventListener("click", async () => {
    records.drop(tenant, record.id);
    line.remove();
    if (picking === record) picking = null;
    await api(`/tenants/${encodeURIComponent(tenant)}/uploads/${record.id}`, { method: "DELETE" }).catch(() => {});
  });
  return line;
}

function pickUp(record) {
  const same = chosen && record.files.length === chosen.parts.length && record.files.every((file) => chosen.parts.some((part) => part.name === file.name && part.file.size === file.size));
  problem.hidden = Boolean(same || record.sha256);
  if (!problem.hidden) return void (problem.textContent = `These are not the files of the interrupted upload: expected ${record.files.map((file) => `${file.shown} (${bytes(file.size)})`).join(" and ")}.`);
  picking = null;
  name.value = record.adapter;
  unfinished.replaceChildren();
  list.replaceChildren(...record.files.map((file) => row(file.name, file.shown, file.size)));
  transfer.pickUp(record, same ? chosen.parts : undefined);
}

buttons();
offer();
