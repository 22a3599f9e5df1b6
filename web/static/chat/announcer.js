// For those who listen: what has become complete, in pieces worth hearing.

const PAUSE_MS = 2500;
const LONGEST_CHARS = 500;

export class Announcer {
  #element;
  #waiting = [];
  #timer = 0;

  constructor(element) {
    this.#element = element;
  }

  say(text) {
    this.#waiting.push(text);
    this.#timer ||= setTimeout(() => this.#speak(), PAUSE_MS);
  }

  #speak() {
    this.#timer = 0;
    this.#element.textContent = this.#waiting.splice(0).join("\n").slice(0, LONGEST_CHARS);
  }
}
