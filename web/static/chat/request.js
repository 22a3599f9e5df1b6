// The request that a conversation makes of the API, and the same as code.

import { withField } from "./socket.js";

/** The body of the chat completion as a JSON text. */
export function bodyOf(model, messages, { seed, ...sampling }) {
  const json = JSON.stringify({ model, messages, ...sampling });
  return seed === undefined ? json : withField(json, "seed", seed);
}

const OPENAI = new Set(["temperature", "top_p", "max_tokens", "seed", "stop", "presence_penalty", "frequency_penalty"]);

const indented = (json, by) => json.replaceAll("\n", `\n${by}`);
const pretty = (value) => JSON.stringify(value, null, 2);
const shown = (name, value) => (name === "seed" ? value : pretty(value));

function curl(origin, { model, messages, sampling: { seed, ...sampling } }) {
  const json = pretty({ model, messages, ...sampling, stream: true });
  const body = seed === undefined ? json : `{\n  "seed": ${seed},${json.slice(1)}`;
  return `curl ${origin}/v1/chat/completions \\
  -H "Authorization: Bearer $STENCILPRESS_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '${body.replaceAll("'", "'\\''")}'`;
}

function python(origin, { model, messages, sampling }) {
  const fields = Object.entries(sampling);
  const known = fields.filter(([name]) => OPENAI.has(name)).map(([name, value]) => `    ${name}=${indented(shown(name, value), "    ")},\n`);
  const extra = fields.filter(([name]) => !OPENAI.has(name)).map(([name, value]) => `"${name}": ${value}`);
  return `import os
from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=os.environ["STENCILPRESS_API_KEY"])
stream = client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=${indented(pretty(messages), "    ")},
    stream=True,
${known.join("")}${extra.length ? `    extra_body={${extra.join(", ")}},\n` : ""})
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="")`;
}

function javascript(origin, { model, messages, sampling }) {
  const fields = Object.entries(sampling).map(([name, value]) => `  ${name}: ${indented(shown(name, value), "  ")},\n`);
  return `import OpenAI from "openai";

const client = new OpenAI({ baseURL: "${origin}/v1", apiKey: process.env.STENCILPRESS_API_KEY });
const stream = await client.chat.completions.create({
  model: ${JSON.stringify(model)},
  messages: ${indented(pretty(messages), "  ")},
  stream: true,
${fields.join("")}});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");`;
}

/** By the name of the language, what makes the same request from outside. */
export const CODE = { curl, Python: python, JavaScript: javascript };
