// What may be asked: the base, the tenant's adapters by name, alias and version, and adapters shared with the tenant.

import { api } from "../api.js";
import { bytes } from "../bytes.js";

const PAGE = 200;
const MAX_ADAPTERS = 5000;
const SHOWN = 60;

/** One choice: `name` goes into `model`, `text` says what it stands for, `rank` puts names before aliases and versions. */
const choice = (name, text, rank, defaults = {}) => ({ name, text, rank, defaults });

export class Models {
  #tenant;
  #choices;

  constructor({ tenant, base, shared }) {
    this.#tenant = tenant;
    this.base = base;
    this.#choices = [choice("base", `${base} without an adapter`, 0), ...shared.map((name) => choice(name, "shared with this tenant", 1))];
  }

  /** All adapters, page by page; `onMore` is called after each. Throws {@link ApiError}. */
  async load(onMore) {
    let next = "";
    for (let seen = 0; next !== null && seen < MAX_ADAPTERS; seen += PAGE) {
      const after = next ? `&after=${encodeURIComponent(next)}` : "";
      const page = await api(`/tenants/${encodeURIComponent(this.#tenant)}/adapters?limit=${PAGE}${after}`);
      for (const adapter of page.data) this.#choices.push(...choicesOf(adapter, this.base));
      next = page.next;
      onMore();
    }
  }

  /** The choices that fit what was typed, the best first. */
  search(text) {
    const wanted = text.trim().toLowerCase();
    const hits = this.#choices.filter(({ name, rank }) => (wanted ? name.includes(wanted) : rank < 2));
    const begins = ({ name }) => (name.startsWith(wanted) ? 0 : 1);
    return hits.sort((a, b) => begins(a) - begins(b) || a.rank - b.rank).slice(0, SHOWN);
  }

  find(name) {
    return this.#choices.find((one) => one.name === name);
  }

  /** What a version brings along for requests that leave it out: `system_prompt` and sampling. */
  defaultsOf(name) {
    return this.find(name)?.defaults ?? {};
  }

  /** The names that are there before anything is typed. */
  get names() {
    return this.#choices.filter(({ rank }) => rank < 2).map(({ name }) => name);
  }
}

function choicesOf(adapter, base) {
  const fitting = adapter.versions.filter((version) => version.base === base && !version.deleted_at);
  const byNumber = new Map(fitting.map((version) => [version.number, version]));
  const aliases = adapter.aliases.filter(({ version }) => byNumber.has(version));
  return [
    ...aliases.map((alias) => ofAlias(adapter.name, alias, byNumber.get(alias.version))),
    ...fitting.reverse().map((version) => choice(version.version, facts(version), 3, version.defaults)),
  ];
}

function ofAlias(adapter, { alias, version, canary }, target) {
  const text = `${alias} is @${version}` + (canary ? `, @${canary.version} for ${canary.percent} % of users` : "");
  return alias === "prod"
    ? choice(adapter, text, 1, target.defaults)
    : choice(`${adapter}@${alias}`, text, 2, target.defaults);
}

const facts = ({ ranks, size_bytes: size }) => `rank ${Math.max(...ranks)} · ${bytes(size)}`;
