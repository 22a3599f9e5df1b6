// Conversations in this browser's IndexedDB, one database per user and tenant. Nothing of them is sent anywhere.

const VERSION = 1;
const MAX_CONVERSATIONS = 200;

const result = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const finished = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });

const turnsOf = (id, from = 0) => IDBKeyRange.bound([id, from], [id, Infinity]);

export class Store {
  #db;

  constructor(db) {
    this.#db = db;
  }

  /** Raises what the browser raises where it keeps nothing, in a private window for instance. */
  static async open(user, tenant) {
    const request = indexedDB.open(`stencilpress-chat/${user}/${tenant}`, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" }).createIndex("updated_at", "updated_at");
      request.result.createObjectStore("turns", { keyPath: ["conversation", "number"] });
    };
    return new Store(await result(request));
  }

  /** Without their turns, the newest first. */
  async list() {
    const found = await result(this.#db.transaction("conversations").objectStore("conversations").index("updated_at").getAll());
    return found.reverse();
  }

  /** The conversation with its turns, or null. */
  async load(id) {
    const transaction = this.#db.transaction(["conversations", "turns"]);
    const head = result(transaction.objectStore("conversations").get(id));
    const turns = result(transaction.objectStore("turns").getAll(turnsOf(id)));
    return (await head) ? { ...(await head), turns: (await turns).map(({ turn }) => turn) } : null;
  }

  /** Keep all but the turns, and forget the oldest conversations beyond the bound. */
  async save({ turns: _, ...head }) {
    const transaction = this.#db.transaction("conversations", "readwrite");
    transaction.objectStore("conversations").put(head);
    await finished(transaction);
    const beyond = (await this.list()).slice(MAX_CONVERSATIONS);
    for (const { id } of beyond) await this.remove(id);
  }

  /** Keep the turns from `from` up to `to`, and none behind the conversation's last. */
  async saveTurns({ id, turns }, from = 0, to = turns.length) {
    const transaction = this.#db.transaction("turns", "readwrite");
    const kept = transaction.objectStore("turns");
    for (let number = from; number < to; number += 1) kept.put({ conversation: id, number, turn: turns[number] });
    kept.delete(turnsOf(id, turns.length));
    transaction.commit(); // rather than with the next task: there is none if the page is being left
    await finished(transaction);
  }

  async remove(id) {
    const transaction = this.#db.transaction(["conversations", "turns"], "readwrite");
    transaction.objectStore("conversations").delete(id);
    transaction.objectStore("turns").delete(turnsOf(id));
    await finished(transaction);
  }

  async clear() {
    const transaction = this.#db.transaction(["conversations", "turns"], "readwrite");
    transaction.objectStore("conversations").clear();
    transaction.objectStore("turns").clear();
    await finished(transaction);
  }
}
