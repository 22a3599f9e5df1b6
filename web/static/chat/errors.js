// What went wrong, in plain words.

const DIMENSIONS = {
  requests_per_minute: "requests in a minute",
  tokens_per_minute: "tokens in a minute",
  concurrent_streams: "answers at once",
  tokens_per_day: "tokens of the day",
  tokens_per_month: "tokens of the month",
};

const TEXTS = {
  model_not_found: "There is no such model, or you may not use it. It may have been deleted, or has no version under this name.",
  engine_lost: "The engine stopped while it worked on this, and is starting again.",
  server_is_overloaded: "The server is full. It takes new requests as soon as others end.",
  service_unavailable: "The server cannot answer right now.",
  deadline_exceeded: "The request waited too long for its turn.",
  adapter_unavailable: "The files of this adapter cannot be loaded. Another version may work.",
  context_length_exceeded: "The conversation does not fit the model's context any more.",
  capacity_exceeded: "This needs more memory than the server has.",
  request_too_large: "The conversation is too long to send.",
  request_timeout: "The answer took longer than the server allows.",
  too_many_messages: "The conversation has more messages than a request may have.",
  too_many_responses: "Too many answers are running in this page.",
  signed_out: "You are not signed in any more. Reload the page to sign in; this conversation is kept.",
  permission_denied: "Your role does not allow this.",
  cut: "The connection was lost in the middle. What had arrived is kept.",
};

const TOO_LONG = new Set(["context_length_exceeded", "capacity_exceeded", "request_too_large", "too_many_messages"]);

/**
 * An error of the API, with `at`, when it came, in ms since the epoch. Gives `text` for people; `detail`, the server's
 * own words where they say more; `retryAt`, where the server said when there is room again; `retry`, whether trying again
 * can help; `shorten`, whether sending less of the conversation can.
 */
export function explain(error) {
  const { dimension, message } = error;
  const code = error.code === "invalid_value" && error.param === "messages" ? "too_many_messages" : error.code;
  if (code === "rate_limit_exceeded" && error.retry_after_ms == null) {
    return { text: message, detail: "", retryAt: null, retry: false };
  }
  if (code === "rate_limit_exceeded") {
    return { text: `The plan allows no more ${DIMENSIONS[dimension] ?? "requests"} just now.`, detail: "", retryAt: error.at + error.retry_after_ms, retry: true };
  }
  if (code === "insufficient_quota") {
    return { text: `The ${DIMENSIONS[dimension] ?? "tokens"} that the plan allows are used up.`, detail: message, retryAt: null, retry: false };
  }
  const text = TEXTS[code];
  return { text: text ?? message, detail: text ? (message ?? "") : "", retryAt: null, retry: true, shorten: TOO_LONG.has(code) };
}

