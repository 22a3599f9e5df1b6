// The figures of answers, as texts.

const number = (value) => value.toLocaleString("en");
const REASONS = { stop: "complete", length: "token limit", cancelled: "stopped" };

/** Of one answer. */
export function figures({ usage, first_token_ms: first, tokens_per_second: speed, finish_reason: reason }) {
  return [
    usage && `${number(usage.completion_tokens)} tokens`,
    first !== null && `first token ${number(first)} ms`,
    speed !== null && `${number(speed)} tok/s`,
    reason && (REASONS[reason] ?? reason),
  ].filter(Boolean);
}

/** Of a column's answers together: none while there is but one. */
export function totals(turns, columnId) {
  const answers = turns.map(({ answers }) => answers[columnId]).filter((answer) => answer?.usage);
  if (answers.length < 2) return [];
  const tokens = answers.reduce((sum, { usage }) => sum + usage.completion_tokens, 0);
  return [
    `${number(answers.length)} answers`,
    `${number(tokens)} tokens`,
    ...median("first token", "ms", answers.map(({ first_token_ms: first }) => first)),
    ...median("", "tok/s", answers.map(({ tokens_per_second: speed }) => speed)),
  ];
}

function median(label, unit, values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted.length ? [`${label} ${number(sorted[Math.floor(sorted.length / 2)])} ${unit}`.trim()] : [];
}
