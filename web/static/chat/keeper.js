// Writing conversations down while they go on: at once where something has ended, once a second while it runs.

const PAUSE_MS = 1000;

export class Keeper {
  #store;
  #onFailure;
  #later = new Map();
  #forgotten = new Set();

  /** `store` is null where the browser keeps nothing; `onFailure(error)` hears that something could not be kept. */
  constructor(store, onFailure) {
    this.#store = store;
    this.#onFailure = onFailure;
    addEventListener("pagehide", () => this.flush());
    document.addEventListener("visibilitychange", () => document.hidden && this.flush());
  }

  /** Everything but the turns. One that nothing was asked in is not worth keeping. */
  head(conversation) {
    if (conversation.turns.length && !this.#forgotten.has(conversation.id)) this.#do((store) => store.save(conversation));
  }

  turns(conversation, from = 0, to = conversation.turns.length) {
    if (!this.#forgotten.has(conversation.id)) this.#do((store) => store.saveTurns(conversation, from, to));
  }

  /** One turn, soon. */
  turnSoon(conversation, number) {
    const key = `${conversation.id}/${number}`;
    if (this.#later.has(key)) return;
    const timer = setTimeout(() => this.#turnNow(key), PAUSE_MS);
    this.#later.set(key, { conversation, number, timer });
  }

  /** Delete a conversation, whatever of it is still to be written. */
  async forget(id) {
    this.#forgotten.add(id);
    await this.#do((store) => store.remove(id));
  }

  /** Delete all, `current` being the one at hand. */
  async forgetAll(current) {
    this.#forgotten.add(current);
    await this.#do((store) => store.clear());
  }

  flush() {
    for (const key of this.#later.keys()) this.#turnNow(key);
  }

  #turnNow(key) {
    const { conversation, number, timer } = this.#later.get(key);
    clearTimeout(timer);
    this.#later.delete(key);
    if (number < conversation.turns.length) this.turns(conversation, number, number + 1);
  }

  async #do(write) {
    if (!this.#store) return;
    try {
      await write(this.#store);
    } catch (error) {
      this.#onFailure(error);
    }
  }
}
