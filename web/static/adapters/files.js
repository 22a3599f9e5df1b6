// Which of the files that somebody chose or dropped make an adapter, and what is wrong with them before they are sent.

import { bytes } from "../bytes.js";

export const CONFIG = "adapter_config.json";
export const WEIGHTS = "adapter_model.safetensors";
export const ARCHIVE = "archive";
const ARCHIVES = /\.(zip|tar|tar\.gz|tgz)$/i;
const MAX_ENTRIES = 500; // of a dropped folder: more is not the folder of one adapter

/** The files of a drop, those of folders included. Reads the drop before it waits: a browser forgets it after that. */
export async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  const found = entries.length ? (await Promise.all(entries.map(unfold))).flat() : [...transfer.files];
  return { files: found, folder: entries.length === 1 && entries[0].isDirectory ? entries[0].name : "" };
}

async function unfold(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => entry.file(resolve, reject))];
  const reader = entry.createReader(), files = [];
  for (let count = 0; count < MAX_ENTRIES; ) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject)); // some at a time
    if (!some.length) break;
    count += some.length;
    files.push(...(await Promise.all(some.filter((one) => one.isFile).map(unfold))).flat());
  }
  return files;
}

/**
 * The parts of an adapter among `files`: `parts` of `{ name, file }`, where name is what the server calls it, the names
 * of those `left` out, and `problems` as texts by part name ("" for the choice as a whole).
 */
export function choose(files, limits) {
  const named = (name) => files.find((file) => file.name === name);
  const config = named(CONFIG), weights = named(WEIGHTS), archives = files.filter((file) => ARCHIVES.test(file.name));
  const problems = {};
  let parts = [];
  if (config && weights) parts = [{ name: CONFIG, file: config }, { name: WEIGHTS, file: weights }];
  else if (archives.length === 1 && !config && !weights) parts = [{ name: ARCHIVE, file: archives[0] }];
  else problems[""] = missing(files, config, weights, archives);
  for (const { name, file } of parts) {
    const limit = name === CONFIG ? limits.config : name === WEIGHTS ? limits.total : limits.total + limits.config;
    if (!file.size) problems[name] = "The file is empty.";
    else if (file.size > limit) problems[name] = `The file has ${bytes(file.size)}; at most ${bytes(limit)} are accepted.`;
  }
  const taken = new Set(parts.map((part) => part.file));
  return { parts, problems, left: files.filter((file) => !taken.has(file)).map((file) => file.name) };
}

function missing(files, config, weights, archives) {
  if (archives.length > 1) return "Send one archive at a time.";
  if (archives.length && (config || weights)) return "Send either an archive or the two files, not both.";
  if (files.some((file) => /^adapter_model\.(bin|pt|pth)$/.test(file.name)) && !weights)
    return `This adapter is saved as a pickle, which is never loaded. Save it as ${WEIGHTS} (safe_serialization=True).`;
  if (config && !weights) return `${WEIGHTS} is missing: choose both files together.`;
  if (weights && !config) return `${CONFIG} is missing: choose both files together.`;
  return `Expected ${CONFIG} and ${WEIGHTS}, or one zip or tar of them.`;
}

/** A name that an adapter may have, out of the name of a folder or an archive; "" if nothing remains. */
export function nameFrom(text) {
  return text.toLowerCase().replace(ARCHIVES, "").replace(/[^a-z0-9._-]+/g, "-").replace(/^[^a-z0-9]+/, "").slice(0, 63);
}
