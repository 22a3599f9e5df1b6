// One column: the model that answers in it, and its turns. Of a long conversation only the last turns are built; earlier
// ones follow as the reader comes near them.

import { Combobox } from "./combobox.js";
import { fromTemplate, part } from "./dom.js";
import { totals } from "./figures.js";
import { Follower } from "./follow.js";
import { TurnView } from "./turn.js";

const PAGE = 20;

export class ColumnView {
  #column;
  #actions;
  #conversation;
  #turns = new Map();
  #from = 0;
  #list;
  #follower;

  /**
   * `actions` has `pick(id, model)`, `removeColumn(id)`, `retry(id, number)`, `shorten(id, number)`, `proceed(id)`, `edit(number, text)` and
   * `block(text)`.
   */
  constructor(conversation, column, models, actions) {
    this.#conversation = conversation;
    this.#column = column;
    this.#actions = actions;
    this.element = fromTemplate("t-column");
    this.#list = part(this.element, "turns");
    this.picker = new Combobox(part(this.element, "model-input"), part(this.element, "options"), {
      search: (text) => models.search(text),
      onPick: (model) => actions.pick(column.id, model),
    });
    part(this.element, "remove").addEventListener("click", () => actions.removeColumn(column.id));
    this.#follower = new Follower(part(this.element, "scroll"), this.#list, part(this.element, "to-end"));
    this.#follower.onNearTop = () => this.#buildEarlier();
    this.showModel();
  }

  get id() {
    return this.#column.id;
  }

  showModel() {
    this.picker.value = this.#column.model;
    this.element.setAttribute("aria-label", this.#column.model);
    part(this.element, "scroll").setAttribute("aria-label", `Conversation with ${this.#column.model}`);
    part(this.element, "empty-model").textContent = this.#column.model;
  }

  /** Draw all of it anew. */
  show() {
    const { turns } = this.#conversation;
    this.#turns.clear();
    this.#from = Math.max(0, turns.length - PAGE);
    this.#list.replaceChildren(...this.#build(this.#from, turns.length));
    this.#showEmpty();
    this.#showTotals();
    this.#follower.toEnd();
  }

  /** A turn was added at the end. */
  addTurn() {
    const { length } = this.#conversation.turns;
    this.#list.append(...this.#build(length - 1, length));
    this.#showEmpty();
    this.#follower.toEnd();
  }

  /** Another answer to a turn has begun. */
  showAnswer(number) {
    this.#turns.get(number)?.showAnswer();
    this.#follower.toEnd();
  }

  /** What {@link hearing} tells of the answer to turn `number`. */
  changed(number, what) {
    const view = this.#turns.get(number)?.answer;
    if (what === "text") view?.grow();
    else if (what === "state") view?.showState();
    else {
      view?.end();
      this.#showTotals();
    }
  }

  /** Draw the line behind the turns that are not sent any more. */
  showSince() {
    const { since } = this.#conversation;
    for (const [number, { element }] of this.#turns) element.classList.toggle("since", since > 0 && number === since);
  }

  editLast() {
    this.#turns.get(this.#conversation.turns.length - 1)?.edit();
  }

  #build(from, to) {
    const built = [];
    for (let number = from; number < to; number += 1) {
      const view = new TurnView(this.#conversation.turns[number], this.id, this.#turnActions(number), this.#actions.block);
      this.#turns.set(number, view);
      view.element.classList.toggle("since", number > 0 && number === this.#conversation.since);
      built.push(view.element);
    }
    return built;
  }

  #turnActions(number) {
    return {
      retry: () => this.#actions.retry(this.id, number),
      shorten: () => this.#actions.shorten(this.id, number),
      proceed: () => this.#actions.proceed(this.id),
      edit: (text) => this.#actions.edit(number, text),
    };
  }

  #buildEarlier() {
    if (!this.#from) return;
    const from = Math.max(0, this.#from - PAGE);
    const built = this.#build(from, this.#from);
    this.#from = from;
    this.#follower.insertAbove(() => this.#list.prepend(...built));
  }

  /** How the model has done so far, the medians of all its answers. */
  #showTotals() {
    part(this.element, "totals").textContent = totals(this.#conversation.turns, this.id).join(" · ");
  }

  #showEmpty() {
    part(this.element, "empty").hidden = this.#conversation.turns.length > 0;
  }
}
