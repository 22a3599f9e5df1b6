// One turn in one column: what the user said, and the answer to it.

import { AnswerView } from "./answer.js";
import { copyBy, fromTemplate, part } from "./dom.js";

export class TurnView {
  #turn;
  #columnId;
  #actions;
  #onBlock;
  answer = null;

  /** `actions` has `retry()`, `shorten()`, `proceed()` and `edit(text)`. */
  constructor(turn, columnId, actions, onBlock) {
    this.#turn = turn;
    this.#columnId = columnId;
    this.#actions = actions;
    this.#onBlock = onBlock;
    this.element = fromTemplate("t-turn", { said: turn.text });
    this.element.addEventListener("click", (event) => this.#act(event.target.closest("[data-act]")));
    this.showAnswer();
  }

  /** Draw the answer of the turn anew: another one has begun. */
  showAnswer() {
    const answer = this.#turn.answers[this.#columnId];
    this.answer?.element.remove();
    this.answer = answer ? new AnswerView(answer, this.#onBlock) : null;
    this.element.hidden = !answer; // asked in other columns only
    if (this.answer) this.element.append(this.answer.element);
  }

  /** Let the user change what was said. */
  edit() {
    const form = fromTemplate("t-edit");
    const said = part(this.element, "saying");
    const area = form.querySelector("textarea");
    const leave = () => {
      form.remove();
      said.hidden = false;
    };
    area.value = this.#turn.text;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = area.value.trim();
      leave();
      if (text) this.#actions.edit(text);
    });
    form.addEventListener("keydown", (event) => editKey(event, form, leave));
    form.querySelector("[data-cancel]").addEventListener("click", leave);
    said.hidden = true;
    said.after(form);
    area.focus();
  }

  #act(button) {
    if (!button) return;
    const acts = {
      edit: () => this.edit(),
      "copy-said": () => copyBy(button, this.#turn.text),
      copy: () => copyBy(button, this.#turn.answers[this.#columnId].text),
      "copy-code": () => copyBy(button, button.closest(".chat-code").querySelector("code").textContent),
      retry: () => this.#actions.retry(),
      "retry-error": () => this.#actions.retry(),
      shorten: () => this.#actions.shorten(),
      continue: () => this.#actions.proceed(),
    };
    acts[button.dataset.act]?.();
  }
}

function editKey(event, form, leave) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) form.requestSubmit();
  else if (event.key === "Escape") leave();
  else return;
  event.preventDefault();
  event.stopPropagation();
}
