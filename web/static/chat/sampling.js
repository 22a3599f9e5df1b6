// The panel of a conversation's settings: its system prompt, and sampling with the ranges that the API has.

const STOP_SIGNS = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };
const MAX_STOPS = 4;
const MAX_STOP_CHARS = 256;

const unescaped = (text) => text.replace(/\\[nt\\]/g, (sign) => STOP_SIGNS[sign]);
const escaped = (text) => text.replace(/[\n\t\\]/g, (sign) => ({ "\n": "\\n", "\t": "\\t", "\\": "\\\\" })[sign]);

export class Settings {
  #form;
  #onChange;

  /** `onChange({ system, sampling })` hears each change that is within the ranges. */
  constructor(form, onChange) {
    this.#form = form;
    this.#onChange = onChange;
    form.addEventListener("input", ({ target }) => this.#changed(target));
    form.addEventListener("submit", (event) => event.preventDefault());
    form.querySelector("[data-reset]").addEventListener("click", () => this.#reset());
  }

  /** Show what a conversation has set. */
  show({ system, sampling }) {
    this.#form.elements.system.value = system;
    for (const field of this.#fields()) {
      const value = sampling[field.name];
      field.value = field.name === "stop" ? (value ?? []).map(escaped).join("\n") : (value ?? "");
      this.#check(field);
      this.#slide(field);
    }
  }

  /** Show what is used where nothing is set: the version's defaults in front of the server's. */
  showDefaults({ system_prompt: prompt, ...defaults }, model) {
    this.#form.elements.system.placeholder = prompt ?? "None";
    for (const field of this.#fields()) {
      const own = defaults[field.name];
      field.placeholder = own ?? field.dataset.default;
      field.closest(".field").querySelector("[data-from]").textContent = own === undefined ? "" : `from ${model}`;
      this.#slide(field);
    }
  }

  get isValid() {
    return this.#fields().every((field) => field.validity.valid);
  }

  /** The first field that is out of range gets the focus. */
  reportInvalid() {
    this.#fields().find((field) => !field.validity.valid)?.focus();
  }

  #fields() {
    return [...this.#form.querySelectorAll("[data-sampling]")];
  }

  #changed(target) {
    const slider = target.closest("[data-slider]");
    if (slider) this.#form.elements[slider.dataset.slider].value = slider.value;
    const field = slider ? this.#form.elements[slider.dataset.slider] : target;
    if (field.dataset.sampling !== undefined) {
      this.#check(field);
      this.#slide(field);
    }
    if (this.isValid) this.#onChange({ system: this.#form.elements.system.value, sampling: this.#read() });
  }

  #reset() {
    this.show({ system: "", sampling: {} });
    this.#onChange({ system: "", sampling: {} });
  }

  #read() {
    const set = this.#fields().filter((field) => field.value.trim() !== "");
    return Object.fromEntries(set.map((field) => [field.name, valueOf(field)]));
  }

  #check(field) {
    field.setCustomValidity(complaint(field));
    const fault = field.validationMessage;
    field.setAttribute("aria-invalid", String(Boolean(fault)));
    field.closest(".field").querySelector("[data-fault]").textContent = fault;
  }

  #slide(field) {
    const slider = this.#form.querySelector(`[data-slider="${field.name}"]`);
    if (!slider) return;
    slider.value = field.value || field.placeholder;
    slider.classList.toggle("unset", field.value === "");
  }
}

/** A seed stays the text that it is: it may be beyond what a number of JavaScript holds. */
function valueOf(field) {
  const text = field.value.trim();
  if (field.name === "stop") return lines(field).map(unescaped);
  return field.name === "seed" ? BigInt(text).toString() : Number(text);
}

const lines = (field) => field.value.split("\n").filter((line) => line !== "");

function complaint(field) {
  const text = field.value.trim();
  if (field.name === "stop") {
    if (lines(field).length > MAX_STOPS) return `At most ${MAX_STOPS} lines.`;
    return lines(field).some((line) => unescaped(line).length > MAX_STOP_CHARS) ? `At most ${MAX_STOP_CHARS} characters a line.` : "";
  }
  if (text === "") return field.validity.badInput ? "Not a number." : "";
  return numberComplaint(text, field.dataset);
}

function numberComplaint(text, { kind, least, most, above }) {
  if (!(kind === "int" ? /^[+-]?\d{1,19}$/ : /^[+-]?(\d+\.?\d*|\.\d+)$/).test(text)) return kind === "int" ? "A whole number." : "A number.";
  const read = kind === "int" ? (value) => BigInt(value.replace("+", "")) : Number;
  const value = read(text);
  if (least !== undefined && value < read(least)) return `At least ${least}.`;
  if (above !== undefined && value <= read(above)) return `More than ${above}.`;
  return most !== undefined && value > read(most) ? `At most ${most}.` : "";
}
