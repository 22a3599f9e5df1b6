// Where a message is written: it grows with its text, and keeps a draft over a reload.

export class Composer {
  #form;
  #input;
  #send;
  #stop;
  #draft;

  /** `on` has `ask(text)`, `stop()` and `editLast()`. */
  constructor(form, draftKey, on) {
    this.#form = form;
    this.#input = form.querySelector("textarea");
    this.#send = form.querySelector("#chat-send");
    this.#stop = form.querySelector("#chat-stop");
    this.#draft = draftKey;
    this.#input.value = sessionStorage.getItem(draftKey) ?? "";
    this.#fit();
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const { text } = this;
      if (text && this.#stop.hidden && on.ask(text)) this.#take("");
    });
    this.#input.addEventListener("input", () => this.#take(this.#input.value));
    this.#input.addEventListener("keydown", (event) => this.#key(event, on));
    this.#stop.addEventListener("click", on.stop);
  }

  get text() {
    return this.#input.value.trim();
  }

  focus() {
    this.#input.focus({ preventScroll: true });
  }

  /** While something runs the button stops it. */
  showRunning(running) {
    const focused = document.activeElement === this.#stop || document.activeElement === this.#send;
    this.#send.hidden = running;
    this.#stop.hidden = !running;
    if (focused) this.focus();
  }

  #take(text) {
    this.#input.value = text;
    sessionStorage.setItem(this.#draft, text);
    this.#fit();
  }

  #key(event, on) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.#form.requestSubmit();
    } else if (event.key === "ArrowUp" && this.#input.value === "") {
      event.preventDefault();
      on.editLast();
    }
  }

  #fit() {
    const { style } = this.#input;
    style.setProperty("height", "auto");
    style.setProperty("height", `${this.#input.scrollHeight + 2}px`);
  }
}
