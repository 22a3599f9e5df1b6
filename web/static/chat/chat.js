// The conversation at hand: asking, stopping, asking again, and its columns. Knows no element of the page.

import { hearing } from "./asking.js";
import { addColumn, addTurn, newAnswer, messagesFor, removeColumn } from "./conversation.js";
import { bodyOf } from "./request.js";

const CONTINUE = "Continue exactly where you stopped.";

export class Chat {
  #socket;
  #keeper;
  #screen;
  #running = new Map(); // by column, what cancels its answer
  conversation;

  /** `screen` shows: `show()`, `addTurn()`, `showAnswer(column, turn)`, `changed(column, turn, what)`, `showSince()`, `running(count)`. */
  constructor(socket, keeper, screen) {
    this.#socket = socket;
    this.#keeper = keeper;
    this.#screen = screen;
  }

  get isRunning() {
    return this.#running.size > 0;
  }

  open(conversation) {
    this.stop();
    this.#running.clear();
    this.conversation = conversation;
    this.#screen.show();
    this.#screen.running(0);
  }

  /** The same to all columns, in one go, so that they share their steps in the engine. */
  ask(text, columns = this.conversation.columns) {
    addTurn(this.conversation, text);
    const number = this.conversation.turns.length - 1;
    const bodies = this.#prepare(number, columns);
    this.#screen.addTurn();
    this.#send(number, bodies);
  }

  stop() {
    for (const cancel of this.#running.values()) cancel();
  }

  retry(columnId, number) {
    const columns = this.conversation.columns.filter(({ id }) => id === columnId);
    if (this.#running.has(columnId)) return;
    const bodies = this.#prepare(number, columns);
    for (const { id } of columns) this.#screen.showAnswer(id, number);
    this.#send(number, bodies);
  }

  /** Send no longer the earlier half of what is sent, and ask again. */
  shorten(columnId, number) {
    const { conversation } = this;
    conversation.since = Math.min(number, Math.ceil((conversation.since + number + 1) / 2));
    this.#screen.showSince();
    this.retry(columnId, number);
  }

  proceed(columnId) {
    if (!this.isRunning) this.ask(CONTINUE, this.conversation.columns.filter(({ id }) => id === columnId));
  }

  /** Say something else in turn `number`; what came after is forgotten. */
  edit(number, text) {
    if (this.isRunning) return;
    this.conversation.turns.length = number;
    this.conversation.since = Math.min(this.conversation.since, number);
    this.#screen.show();
    this.ask(text);
  }

  pick(columnId, model) {
    this.conversation.columns.find(({ id }) => id === columnId).model = model;
    this.#keeper.head(this.conversation);
  }

  addColumn(model) {
    const column = addColumn(this.conversation, model);
    this.#keepAll();
    return column;
  }

  removeColumn(columnId) {
    this.#running.get(columnId)?.();
    removeColumn(this.conversation, columnId);
    this.#keepAll();
  }

  set({ system, sampling }) {
    Object.assign(this.conversation, { system, sampling });
    this.#keeper.head(this.conversation);
  }

  rename(title) {
    this.conversation.title = title;
    this.#keeper.head(this.conversation);
  }

  /** What would be sent for turn `number` of a column. */
  requestOf(column, number) {
    return { model: column.model, messages: messagesFor(this.conversation, column, number), sampling: this.conversation.sampling };
  }

  #prepare(number, columns) {
    const { answers } = this.conversation.turns[number];
    return columns.map((column) => {
      const answer = newAnswer(column.model);
      answers[column.id] = answer;
      const { model, messages, sampling } = this.requestOf(column, number);
      return { id: column.id, answer, body: bodyOf(model, messages, sampling) };
    });
  }

  #send(number, bodies) {
    const conversation = this.conversation;
    conversation.updated_at = Date.now();
    this.#keeper.head(conversation);
    this.#keeper.turns(conversation, number);
    for (const { id, answer, body } of bodies) {
      const cancel = this.#socket.ask(body, hearing(answer, (what) => this.#changed(conversation, id, number, what)));
      this.#running.set(id, cancel);
    }
    this.#screen.running(this.#running.size);
  }

  #changed(conversation, id, number, what) {
    const ended = what === "end";
    if (ended) this.#keeper.turns(conversation, number, number + 1);
    else this.#keeper.turnSoon(conversation, number);
    if (conversation !== this.conversation) return;
    this.#screen.changed(id, number, what);
    if (ended) {
      this.#running.delete(id);
      this.#screen.running(this.#running.size);
    }
  }

  #keepAll() {
    this.#keeper.head(this.conversation);
    if (this.conversation.turns.length) this.#keeper.turns(this.conversation);
  }
}
