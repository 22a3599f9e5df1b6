// One WebSocket for all answers of the page. It connects again by itself and tells each answer what became of it.

const FIRST_WAIT_MS = 400;
const LONGEST_WAIT_MS = 15_000;
const POLICY_VIOLATION = 1008;

/** `json` with one more field; `raw` is JSON. Integers beyond 2^53 stay what they are. */
export const withField = (json, name, raw) => `{${JSON.stringify(name)}:${raw}${json === "{}" ? "" : ","}${json.slice(1)}`;

/** A question that was sent, or will be once there is a connection. `heard` is told what comes back. */
class Asked {
  responseId = null;
  sent = false;
  cancelled = false;

  constructor(id, body, heard) {
    Object.assign(this, { id, body, heard });
  }
}

/**
 * `onState` hears `connecting`, `open`, `waiting` (until it tries again), `signed-out` and `refused`, the last two being
 * ends. `signedOut` finds out whether a connection failed because nobody is signed in.
 */
export class ChatSocket {
  #url;
  #onState;
  #signedOut;
  #socket = null;
  #ready = false;
  #failures = 0;
  #timer = 0;
  #ended = false;
  #count = 0;
  #asked = new Map();
  #byResponse = new Map();

  constructor(url, { onState, signedOut }) {
    this.#url = url;
    this.#onState = onState;
    this.#signedOut = signedOut;
    addEventListener("online", () => this.#connectSoon());
    document.addEventListener("visibilitychange", () => document.hidden || this.#connectSoon());
    this.connect();
  }

  /**
   * Ask for an answer to the chat completion `body`, a JSON text. `heard` has `sent()`, `created(model)`, `delta(text)`,
   * `done(response, finishReason)`, `failed(error)` and `cut()`, of which exactly one of the last three comes at the end.
   * Returns what cancels it.
   */
  ask(body, heard) {
    const asked = new Asked(`ask-${++this.#count}`, body, heard);
    this.#asked.set(asked.id, asked);
    if (this.#ready) this.#send(asked);
    else this.connect();
    return () => this.#cancel(asked);
  }

  /** Try now, whatever has been waited for. */
  connect() {
    if (this.#socket || this.#ended) return;
    clearTimeout(this.#timer);
    this.#onState("connecting");
    const socket = new WebSocket(this.#url);
    this.#socket = socket;
    socket.onmessage = ({ data }) => this.#hear(JSON.parse(data));
    socket.onclose = ({ code }) => this.#closed(code);
  }

  #connectSoon() {
    if (this.#failures) this.connect();
  }

  #send(asked) {
    asked.sent = true;
    const body = withField(asked.body, "metadata", JSON.stringify({ ask: asked.id }));
    this.#socket.send(`{"type":"response.create","event_id":"${asked.id}","response":${body}}`);
    asked.heard.sent();
  }

  #cancel(asked) {
    if (!this.#asked.has(asked.id)) return;
    asked.cancelled = true;
    if (!asked.sent) this.#end(asked).failed({ code: "cancelled", message: "" });
    else if (asked.responseId) this.#socket.send(JSON.stringify({ type: "response.cancel", response_id: asked.responseId }));
  }

  #end(asked) {
    this.#asked.delete(asked.id);
    this.#byResponse.delete(asked.responseId);
    return asked.heard;
  }

  #hear(event) {
    const { type, response } = event;
    const asked = this.#asked.get(response?.metadata?.ask ?? event.error?.event_id) ?? this.#byResponse.get(event.response_id);
    if (type === "session.created") this.#opened();
    else if (!asked) return;
    else if (type === "response.created") this.#created(asked, response);
    else if (type === "response.output_text.delta") asked.heard.delta(event.delta);
    else if (type === "response.output_text.done") asked.reason = event.finish_reason;
    else if (type === "error") this.#end(asked).failed(event.error);
    else if (type === "response.done" && response.status === "failed") this.#end(asked).failed(response.status_details.error);
    else if (type === "response.done") this.#end(asked).done(response, asked.reason);
  }

  #opened() {
    this.#ready = true;
    this.#failures = 0;
    this.#onState("open");
    for (const asked of this.#asked.values()) this.#send(asked);
  }

  #created(asked, response) {
    asked.responseId = response.id;
    this.#byResponse.set(response.id, asked);
    asked.heard.created(response.model);
    if (asked.cancelled) this.#cancel(asked);
  }

  async #closed(code) {
    this.#socket = null;
    this.#ready = false;
    this.#failures += 1;
    for (const asked of [...this.#asked.values()]) if (asked.sent) this.#end(asked).cut();
    if (code === POLICY_VIOLATION) return this.#give("refused");
    if (this.#failures > 1 && (await this.#signedOut())) return this.#give("signed-out");
    const longest = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** (this.#failures - 1));
    this.#onState("waiting");
    this.#timer = setTimeout(() => this.connect(), longest * (0.5 + Math.random() / 2));
  }

  #give(state) {
    this.#ended = true;
    this.#onState(state);
    for (const asked of [...this.#asked.values()]) this.#end(asked).cut();
  }
}
