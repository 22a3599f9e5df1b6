// What a conversation is: columns, one per model, and turns, each a user's text and the columns' answers to it. Plain
// data, as it is kept and exported.

export const MAX_COLUMNS = 4;
const TITLE_CHARS = 60;

const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");

/**
 * `sampling` holds what is set, under the names of the API; `system` "" leaves it to the model's version. Turns before
 * number `since` are not sent any more: they would not fit the context.
 */
export function newConversation(models, { system = "", sampling = {} } = {}) {
  const now = Date.now();
  return { id: newId(), title: "", created_at: now, updated_at: now, system, sampling, since: 0, columns: models.map(newColumn), turns: [] };
}

const newColumn = (model) => ({ id: newId(), model });

/** `status` is waiting, streaming, done, stopped, cut (the connection was lost) or failed (`error` says why). */
export const newAnswer = (model) => ({
  model,
  resolved: null,
  status: "waiting",
  text: "",
  finish_reason: null,
  usage: null,
  first_token_ms: null,
  tokens_per_second: null,
  error: null,
});

export const isRunning = (answer) => answer?.status === "waiting" || answer?.status === "streaming";

export function addTurn(conversation, text) {
  conversation.title ||= titleOf(text);
  const turn = { text, at: Date.now(), answers: {} };
  conversation.turns.push(turn);
  return turn;
}

/** A column that goes on from what the first one has said so far, so that from here on both are asked the same. */
export function addColumn(conversation, model) {
  const [first] = conversation.columns;
  const column = newColumn(model);
  for (const { answers } of conversation.turns) {
    if (first && answers[first.id]) answers[column.id] = settled(structuredClone(answers[first.id]));
  }
  conversation.columns.push(column);
  return column;
}

export function removeColumn(conversation, id) {
  conversation.columns = conversation.columns.filter((column) => column.id !== id);
  for (const { answers } of conversation.turns) delete answers[id];
}

/**
 * The messages that ask for the answer to turn `at` in a column. Turns that the column was not asked are not its own; texts
 * that got no answer are asked together with the next, since templates want the roles to alternate.
 */
export function messagesFor(conversation, column, at) {
  const messages = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  for (let number = Math.min(conversation.since, at); number <= at && number < conversation.turns.length; number += 1) {
    const { text, answers } = conversation.turns[number];
    if (!answers[column.id]) continue;
    const last = messages.at(-1);
    if (last?.role === "user") last.content += `\n\n${text}`;
    else messages.push({ role: "user", content: text });
    const said = answers[column.id].text;
    if (number < at && said) messages.push({ role: "assistant", content: said });
  }
  return messages;
}

/** The answer as it is once nothing runs for it any more: of one that was under way the connection is gone. */
export function settled(answer) {
  return isRunning(answer) ? { ...answer, status: "cut" } : answer;
}

const titleOf = (text) => {
  const [first] = text.split("\n").map((line) => line.replace(/^[\s#>*`|-]+/, "").trim()).filter(Boolean);
  const line = (first ?? text.trim()).replace(/\s+/g, " ");
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1)}…` : line;
};

export const asJson = (conversation) => JSON.stringify(conversation, null, 2) + "\n";

export function asMarkdown({ title, created_at, system, columns, turns }) {
  const head = [`# ${title || "Conversation"}`, `${new Date(created_at).toISOString()}`];
  if (system.trim()) head.push(`## System\n\n${system}`);
  const body = turns.flatMap(({ text, answers }) => [
    `## User\n\n${text}`,
    ...columns.filter(({ id }) => answers[id]).map(({ id }) => `## ${answers[id].resolved ?? answers[id].model}\n\n${answers[id].text || "(no answer)"}`),
  ]);
  return [...head, ...body].join("\n\n") + "\n";
}
