// The frame around the columns: which there are, their tabs on a narrow screen, the title, what is announced.

import { ColumnView } from "./column.js";
import { MAX_COLUMNS } from "./conversation.js";
import { figures } from "./figures.js";

const $ = (id) => document.getElementById(id);

export class Screen {
  #models;
  #composer;
  #announcer;
  #columns = new Map();
  #visible = new IntersectionObserver((entries) => this.#seen(entries), { root: $("chat-columns"), threshold: [0, 0.25, 0.5, 0.75, 1] });
  #shares = new Map(); // of each column, how much of it is in view

  /** `chat` and `actions` are set once they exist. */
  constructor({ models, composer, announcer }) {
    this.#models = models;
    this.#composer = composer;
    this.#announcer = announcer;
  }

  /** Draw the whole conversation. */
  show() {
    const { conversation } = this.chat;
    this.#columns.clear();
    this.#shares.clear();
    this.#visible.disconnect();
    $("chat-columns").replaceChildren();
    for (const column of conversation.columns) this.#append(column);
    this.#arrange();
  }

  /** Another column at the end, ready to choose its model. */
  addColumn(column) {
    const view = this.#append(column);
    this.#arrange();
    view.element.scrollIntoView({ inline: "nearest", block: "nearest" });
    view.element.querySelector("[role=combobox]").focus();
    view.picker.open("");
  }

  removeColumn(id) {
    const { element } = this.#columns.get(id);
    this.#visible.unobserve(element);
    element.remove();
    this.#columns.delete(id);
    this.#arrange();
  }

  addTurn() {
    for (const view of this.#columns.values()) view.addTurn();
    this.showTitle();
  }

  showAnswer(id, number) {
    this.#columns.get(id)?.showAnswer(number);
  }

  changed(id, number, what) {
    const view = this.#columns.get(id);
    view?.changed(number, what);
    if (view && what === "end") this.#sayEnd(this.chat.conversation.turns[number].answers[id]);
  }

  running(count) {
    this.#composer.showRunning(count > 0);
    $("chat-columns").toggleAttribute("data-running", count > 0);
    $("chat-compare").disabled = count > 0 || this.#columns.size >= MAX_COLUMNS;
  }

  showSince() {
    for (const view of this.#columns.values()) view.showSince();
  }

  editLast() {
    this.#columns.values().next().value?.editLast();
  }

  showTitle() {
    const { title } = this.chat.conversation;
    $("chat-title").textContent = title || "New conversation";
    document.title = `${title || "Chat"} · Stencilpress`;
    for (const one of document.querySelectorAll("[data-kept]")) one.disabled = !this.chat.conversation.turns.length;
  }

  /** The names over the columns and on the tabs. */
  showModels() {
    for (const view of this.#columns.values()) view.showModel();
    this.#showTabs();
  }

  /** More models are known. */
  refreshModels() {
    for (const view of this.#columns.values()) view.picker.refresh();
  }

  get choosing() {
    return [...this.#columns.values()].some((view) => view.picker.isOpen);
  }

  #append(column) {
    const view = new ColumnView(this.chat.conversation, column, this.#models, this.actions);
    this.#columns.set(column.id, view);
    $("chat-columns").append(view.element);
    this.#visible.observe(view.element);
    view.show();
    return view;
  }

  #arrange() {
    const count = this.#columns.size;
    $("chat-columns").dataset.count = count;
    $("chat-compare").disabled = this.chat.isRunning || count >= MAX_COLUMNS;
    this.#showTabs();
    this.showTitle();
  }

  #showTabs() {
    const { columns } = this.chat.conversation;
    $("chat-tabs").dataset.count = columns.length;
    $("chat-tabs").replaceChildren(...columns.map(({ id, model }) => this.#tab(id, model)));
    this.#markTab();
  }

  #tab(id, model) {
    const tab = Object.assign(document.createElement("button"), { type: "button", textContent: model });
    tab.dataset.column = id;
    tab.addEventListener("click", () => this.#columns.get(id).element.scrollIntoView({ inline: "start", block: "nearest" }));
    return tab;
  }

  #seen(entries) {
    for (const { target, intersectionRatio } of entries) this.#shares.set(target, intersectionRatio);
    this.#markTab();
  }

  /** The tab of the column that is most in view. */
  #markTab() {
    const share = ([, { element }]) => this.#shares.get(element) ?? 0;
    const [current] = [...this.#columns].reduce((best, one) => (share(one) > share(best) ? one : best));
    for (const tab of $("chat-tabs").children) tab.setAttribute("aria-current", String(tab.dataset.column === current));
  }

  /** A running answer's complete block. Several answers at once would be noise: of those only the ends are told. */
  sayBlock(text) {
    if (this.#columns.size === 1) this.#announcer.say(text);
  }

  #sayEnd(answer) {
    const ends = { done: "complete", stopped: "stopped", cut: "cut off, the connection was lost", failed: "failed" };
    const facts = figures({ ...answer, finish_reason: null }).join(", ");
    this.#announcer.say(`${answer.resolved ?? answer.model}: ${ends[answer.status]}. ${facts}`);
  }
}
