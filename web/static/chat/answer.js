// One answer on the screen: its text as it grows, its figures, and what can be done with it.

import { isRunning } from "./conversation.js";
import { fromTemplate, part } from "./dom.js";
import { explain } from "./errors.js";
import { figures } from "./figures.js";
import { nextFrame } from "./frames.js";
import { GrowingMarkdown, markdown } from "./markdown.js";

export class AnswerView {
  #answer;
  #growing = null;
  #timer = 0;
  #onBlock;

  /** `onBlock(text)` hears each block of a running answer once it is complete. */
  constructor(answer, onBlock) {
    this.#answer = answer;
    this.#onBlock = onBlock;
    this.element = fromTemplate("t-answer");
    if (!isRunning(answer)) part(this.element, "text").append(markdown(answer.text));
    this.showState();
  }

  /** The text has grown; it is drawn with the next frame. */
  grow() {
    nextFrame(this.#draw);
  }

  /** The answer has ended: all of it is drawn at once. */
  end() {
    this.#growing ??= new GrowingMarkdown(part(this.element, "text"));
    this.#growing.finish(this.#answer.text);
    this.#growing = null;
    this.showState();
  }

  showState() {
    const answer = this.#answer;
    const running = isRunning(answer);
    this.element.dataset.status = answer.status;
    this.element.setAttribute("aria-busy", String(running));
    part(this.element, "model").textContent = answer.resolved ?? answer.model;
    part(this.element, "wait").hidden = answer.status !== "waiting";
    part(this.element, "foot").hidden = running;
    part(this.element, "figures").textContent = figures(answer).join(" · ");
    this.#showError();
    this.#offer(answer, running);
  }

  #draw = () => {
    if (!isRunning(this.#answer)) return;
    this.#growing ??= new GrowingMarkdown(part(this.element, "text"));
    const complete = this.#growing.update(this.#answer.text);
    if (complete) this.#onBlock(complete);
  };

  #offer({ status, text, finish_reason: reason }, running) {
    const refused = status === "failed" || status === "cut"; // which has a button of its own
    const open = reason === "length" || status === "cut" || status === "stopped";
    for (const [act, offered] of Object.entries({ copy: text !== "", retry: !running && !refused, continue: text !== "" && open })) {
      this.element.querySelector(`[data-act="${act}"]`).hidden = !offered;
    }
  }

  #showError() {
    clearInterval(this.#timer);
    const { status, error } = this.#answer;
    const fault = status === "cut" ? { code: "cut" } : status === "failed" ? error : null;
    part(this.element, "error").hidden = !fault;
    if (!fault) return;
    const { text, detail, retryAt, retry, shorten } = explain(fault);
    part(this.element, "error-text").textContent = text;
    part(this.element, "error-detail").textContent = detail;
    this.element.querySelector("[data-act=retry-error]").hidden = !retry;
    this.element.querySelector("[data-act=shorten]").hidden = !shorten;
    if (retryAt) this.#countDown(text, retryAt);
  }

  #countDown(text, retryAt) {
    const show = () => {
      const left = Math.ceil((retryAt - Date.now()) / 1000);
      part(this.element, "error-text").textContent = `${text} ${left > 0 ? `There is room again in ${left} s.` : "There is room again."}`;
      if (left <= 0 || !this.element.isConnected) clearInterval(this.#timer);
    };
    this.#timer = setInterval(show, 1000);
    show();
  }
}
