// One upload in parts over the admin API: it survives lost connections, and with its record reloads of the page.

import { api, ApiError } from "../api.js";
import { sha256 } from "../vendor/noble-hashes/sha2.js";

const PART_BYTES = 8 << 20;
const TRIES = 5;
const AGAIN = new Set([408, 429, 502, 503, 504]);
const PREFIX = "upload:";

const hex = (data) => Array.from(data, (byte) => byte.toString(16).padStart(2, "0")).join("");

/** SHA-256 of a part. Browsers have one of their own where the page is secure; over plain HTTP they do not. */
async function digest(data) {
  return hex(crypto.subtle ? new Uint8Array(await crypto.subtle.digest("SHA-256", data)) : sha256(data));
}

/** What this browser remembers of uploads of a tenant that are not done: `{ id, adapter, files: [{ name, size, shown }], sha256? }`. */
export const records = {
  of(tenant) {
    const prefix = `${PREFIX}${tenant}/`;
    return Object.keys(localStorage).filter((key) => key.startsWith(prefix)).sort().map((key) => {
      try {
        return JSON.parse(localStorage.getItem(key));
      } catch {
        localStorage.removeItem(key);
        return null;
      }
    }).filter(Boolean);
  },
  keep: (tenant, record) => localStorage.setItem(`${PREFIX}${tenant}/${record.id}`, JSON.stringify(record)),
  drop: (tenant, id) => localStorage.removeItem(`${PREFIX}${tenant}/${id}`),
};

/** A file on its way: how much the server has, and the running digest of the whole of it. */
class Sending {
  constructor(name, file) {
    Object.assign(this, { name, file, size: file.size, sent: 0, hashed: 0, hash: sha256.create() });
  }
  read = async (from, to) => new Uint8Array(await this.file.slice(from, to).arrayBuffer());
  take(data) {
    this.hash.update(data);
    this.hashed += data.length;
  }
  /** Bring the digest to where the server is, such as after a reload. */
  async catchUp(signal) {
    if (this.hashed > this.sent) Object.assign(this, { hashed: 0, hash: sha256.create() });
    while (this.hashed < this.sent && !signal.aborted) this.take(await this.read(this.hashed, Math.min(this.sent, this.hashed + PART_BYTES)));
  }
}

/**
 * States: sending, paused, checking (the server looks at it), done, failed (not to be repeated), cancelled. `changed` is
 * called after every step. With `error` set, paused means that something failed that may be tried again.
 */
export class Transfer {
  constructor(tenant, changed) {
    Object.assign(this, { tenant, changed, state: "paused", files: [], record: null, result: null, error: null });
    this.path = `/tenants/${encodeURIComponent(tenant)}/uploads`;
  }

  /** Begin a new upload of `parts` (see files.js). Resolves when it is done, paused or failed. */
  async begin(adapter, options, parts) {
    this.#say("sending");
    try {
      const { id } = await api(this.path, { method: "POST", body: { adapter, ...options } });
      this.#keep({ id, adapter, files: parts.map(({ name, file }) => ({ name, size: file.size, shown: file.name })) });
    } catch (error) {
      return this.#say("failed", error);
    }
    this.files = parts.map(({ name, file }) => new Sending(name, file));
    return this.resume();
  }

  /** Go on with an upload that this browser remembers; without `parts` if all of it has been sent. */
  async pickUp(record, parts) {
    this.record = record;
    this.files = (parts ?? []).map(({ name, file }) => new Sending(name, file));
    return this.resume();
  }

  async resume() {
    const { signal } = (this.stopping = new AbortController());
    this.#say("sending");
    for (let tried = 0; ; tried++) {
      try {
        if (this.files.length) await this.#send(signal, () => (tried = 0));
        this.#say("checking");
        this.result = await api(`${this.path}/${this.record.id}/complete`, { method: "POST", body: { sha256: this.record.sha256 } });
        records.drop(this.tenant, this.record.id);
        return this.#say("done");
      } catch (error) {
        if (signal.aborted) return this.state === "cancelled" ? undefined : this.#say("paused");
        if (tried + 1 < TRIES && transient(error, this.state)) await pause(500 * 2 ** tried, signal);
        else return this.#fail(error);
        if (signal.aborted) return this.state === "cancelled" ? undefined : this.#say("paused");
      }
    }
  }

  pause() {
    this.stopping?.abort();
  }

  async cancel() {
    this.#say("cancelled");
    this.stopping?.abort();
    if (!this.record) return;
    records.drop(this.tenant, this.record.id);
    await api(`${this.path}/${this.record.id}`, { method: "DELETE" }).catch(() => {}); // it is forgotten by itself in a day
  }

  async #send(signal, moved) {
    const { received_bytes: received } = await api(`${this.path}/${this.record.id}`, { signal });
    for (const file of this.files) file.sent = received[file.name] ?? 0;
    this.#say("sending");
    for (const file of this.files) {
      await file.catchUp(signal);
      while (file.sent < file.size && !signal.aborted) {
        const data = await file.read(file.sent, file.sent + PART_BYTES);
        const query = new URLSearchParams({ offset: file.sent, sha256: await digest(data) });
        const body = new Blob([data], { type: "application/octet-stream" });
        await api(`${this.path}/${this.record.id}/files/${file.name}?${query}`, { method: "PUT", body, headers: { "content-type": body.type }, signal });
        file.take(data);
        file.sent += data.length;
        moved();
        this.#say("sending");
      }
      signal.throwIfAborted();
    }
    const sums = this.files.map((file) => [file.name, hex(file.hash.clone().digest())]);
    this.#keep({ ...this.record, sha256: Object.fromEntries(sums) });
  }

  #keep(record) {
    this.record = record;
    records.keep(this.tenant, record);
  }

  #fail(error) {
    const gone = error instanceof ApiError && (error.status === 404 || ["invalid_adapter", "digest_mismatch"].includes(error.code));
    if (gone) records.drop(this.tenant, this.record.id);
    this.#say(gone ? "failed" : "paused", error);
  }

  #say(state, error = null) {
    if (this.state === "cancelled") return;
    Object.assign(this, { state, error });
    this.changed(this);
  }
}

/** Whether the same may succeed later: the network, a server that is busy, an offset that it knows better, a spoilt part. */
function transient(error, state) {
  if (!(error instanceof ApiError)) return error.name !== "NotReadableError"; // a file that has changed on disk
  if (error.code === "digest_mismatch") return state === "sending"; // of the whole file: it is another one
  return AGAIN.has(error.status) || ["wrong_offset", "upload_busy"].includes(error.code);
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
