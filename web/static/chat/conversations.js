// The list of what was talked about, the newest first.

import { fromTemplate, part } from "./dom.js";
import { tellTimes } from "../console.js";

const SEARCH_FROM = 8;

export class ConversationList {
  #element;
  #search;
  #clear;
  #onDelete;
  #heads = [];
  #current = "";

  /** `onDelete(id)` and `onClear()` hear what the reader wants gone. */
  constructor({ list, search, clear }, { onDelete, onClear }) {
    this.#element = list;
    this.#search = search;
    this.#clear = clear;
    this.#onDelete = onDelete;
    search.addEventListener("input", () => this.#draw());
    clear.addEventListener("click", onClear);
  }

  show(heads, current) {
    this.#heads = heads;
    this.#current = current;
    this.#search.hidden = heads.length < SEARCH_FROM;
    this.#clear.hidden = heads.length === 0;
    this.#draw();
  }

  #draw() {
    const wanted = this.#search.hidden ? "" : this.#search.value.trim().toLowerCase();
    const shown = this.#heads.filter(({ title }) => title.toLowerCase().includes(wanted));
    this.#element.replaceChildren(...shown.map((head) => this.#item(head)));
    tellTimes(this.#element);
  }

  #item({ id, title, updated_at: at, columns }) {
    const item = fromTemplate("t-conversation", { title: title || "Untitled" });
    const link = part(item, "link");
    link.href = `#${id}`;
    link.title = title;
    if (id === this.#current) link.setAttribute("aria-current", "true");
    const time = Object.assign(document.createElement("time"), { dateTime: new Date(at).toISOString() });
    time.dataset.relative = "";
    part(item, "when").append(time, columns.length > 1 ? ` · ${columns.length} models` : "");
    const remove = part(item, "delete");
    remove.setAttribute("aria-label", `Delete “${title}”`);
    remove.addEventListener("click", () => this.#onDelete(id, title));
    return item;
  }
}
