// What a connection says of an answer, written into the answer.

/**
 * Hears the events of one answer. `changed("text" | "state" | "end")` is called after each change. The first token's time
 * is counted from when the question went out, as the person at the screen feels it.
 */
export function hearing(answer, changed) {
  let asked = performance.now();
  let first = 0;
  let last = 0;

  function end(status, more) {
    Object.assign(answer, { status, ...more });
    changed("end");
  }

  return {
    sent() {
      asked = performance.now();
    },
    created(model) {
      answer.resolved = model;
      changed("state");
    },
    delta(text) {
      last = performance.now();
      if (!first) {
        first = last;
        answer.first_token_ms = Math.round(first - asked);
        answer.status = "streaming";
        changed("state");
      }
      answer.text += text;
      changed("text");
    },
    done({ status, usage }, reason) {
      const tokens = usage?.completion_tokens ?? 0;
      const speed = tokens > 1 && last > first ? Math.round(((tokens - 1) / (last - first)) * 10_000) / 10 : null;
      const stopped = status === "cancelled";
      end(stopped ? "stopped" : "done", { usage, finish_reason: reason ?? null, tokens_per_second: speed });
    },
    failed(error) {
      if (error.code === "cancelled") end("stopped", { finish_reason: "cancelled" });
      else end("failed", { error: { ...error, at: Date.now() } });
    },
    cut() {
      end("cut", {});
    },
  };
}
