// A text field with a list to choose from: the combobox pattern of the ARIA authoring practices.

import { fromTemplate } from "./dom.js";

let count = 0;

export class Combobox {
  #input;
  #list;
  #search;
  #onPick;
  #value = "";
  #active = -1;

  /** `search(text)` gives choices with `name` and `text`; `onPick(name)` hears what was chosen or typed. */
  constructor(input, list, { search, onPick }) {
    this.#input = input;
    this.#list = list;
    this.#search = search;
    this.#onPick = onPick;
    list.id = `models-${++count}`;
    input.setAttribute("aria-controls", list.id);
    input.addEventListener("focus", () => input.select());
    input.addEventListener("click", () => this.open(""));
    input.addEventListener("input", () => this.open(input.value));
    input.addEventListener("keydown", (event) => this.#key(event));
    input.addEventListener("blur", () => this.#leave());
    list.addEventListener("pointerdown", (event) => event.preventDefault()); // the field keeps the focus
    list.addEventListener("click", (event) => this.#pick(event.target.closest("[role=option]")?.dataset.name));
  }

  get value() {
    return this.#value;
  }

  set value(name) {
    this.#value = name;
    this.#input.value = name;
    this.#input.title = name;
  }

  get isOpen() {
    return this.#list.matches(":popover-open");
  }

  open(text) {
    this.#fill(text);
    if (!this.isOpen) this.#list.showPopover();
    this.#place();
    this.#input.setAttribute("aria-expanded", "true");
  }

  /** More choices have come. */
  refresh() {
    if (this.isOpen) this.#fill(this.#input.value === this.#value ? "" : this.#input.value);
  }

  close() {
    if (this.isOpen) this.#list.hidePopover();
    this.#input.setAttribute("aria-expanded", "false");
    this.#input.removeAttribute("aria-activedescendant");
    this.#active = -1;
  }

  #fill(text) {
    const found = this.#search(text);
    const options = found.map(({ name, text: about }, at) => this.#option(name, about, at));
    const typed = text.trim();
    if (typed && !found.some(({ name }) => name === typed)) options.push(this.#option(typed, "as typed", options.length));
    this.#list.replaceChildren(...options);
    this.#activate(typed ? 0 : found.findIndex(({ name }) => name === this.#value));
  }

  #option(name, about, at) {
    const option = fromTemplate("t-option", { name, about });
    option.id = `${this.#list.id}-${at}`;
    option.dataset.name = name;
    option.setAttribute("aria-selected", String(name === this.#value));
    return option;
  }

  #activate(at) {
    const options = this.#list.children;
    options[this.#active]?.classList.remove("active");
    this.#active = options.length ? (at + options.length) % options.length : -1;
    if (at < 0) this.#active = -1;
    const option = options[this.#active];
    option?.classList.add("active");
    option?.scrollIntoView({ block: "nearest" });
    if (option) this.#input.setAttribute("aria-activedescendant", option.id);
    else this.#input.removeAttribute("aria-activedescendant");
  }

  #move(step) {
    if (!this.isOpen) return this.open("");
    const count = this.#list.children.length;
    this.#activate(count ? (this.#active < 0 && step < 0 ? count - 1 : (this.#active + step + count) % count) : -1);
  }

  #key(event) {
    const { key } = event;
    if (key === "ArrowDown") this.#move(1);
    else if (key === "ArrowUp") this.#move(-1);
    else if (key === "Enter") this.#pick(this.#list.children[this.#active]?.dataset.name ?? this.#input.value.trim());
    else if (key === "Escape" && this.isOpen) {
      this.value = this.#value;
      this.close();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #pick(name) {
    if (name) {
      this.value = name;
      this.#onPick(name);
    }
    this.close();
  }

  #leave() {
    const typed = this.#input.value.trim();
    if (typed && typed !== this.#value) this.#pick(typed);
    else this.value = this.#value;
    this.close();
  }

  #place() {
    const box = this.#input.getBoundingClientRect();
    const width = Math.min(Math.max(box.width, 280), innerWidth - 16);
    const style = this.#list.style;
    style.setProperty("left", `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`);
    style.setProperty("top", `${box.bottom + 4}px`);
    style.setProperty("width", `${width}px`);
    style.setProperty("max-height", `${Math.max(160, Math.min(360, innerHeight - box.bottom - 16))}px`);
  }
}
