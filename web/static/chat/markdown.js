// Markdown as nodes that can do nothing: no images, no handlers, links only to the web, raw HTML shown as the text it is.

import { Marked } from "../vendor/marked/marked.esm.js";
import createPurifier from "../vendor/dompurify/purify.es.mjs";

const TAGS = "p br hr h1 h2 h3 h4 h5 h6 strong em del code pre blockquote ul ol li table thead tbody tr th td a".split(" ");
const LINK = /^(?:https?:\/\/|mailto:)/i;
const LANGUAGE = /^language-[\w+#.-]{1,32}$/;
const DEFINITION = /^ {0,3}\[[^\]\n]+\]:/m;

const escape = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => (/^<br\s*\/?>$/i.test(text.trim()) ? "<br>" : escape(text)),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const purifier = createPurifier(window);
const RULES = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOWED_URI_REGEXP: LINK,
  ADD_URI_SAFE_ATTR: ["align", "start"], // not addresses, which is what all others are checked as
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
purifier.addHook("uponSanitizeAttribute", (_node, attribute) => {
  if (attribute.attrName === "class" && !LANGUAGE.test(attribute.attrValue)) attribute.keepAttr = false;
});
purifier.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A" || !node.hasAttribute("href")) return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

/** A whole text as nodes. */
export function markdown(text) {
  const fragment = document.createDocumentFragment();
  for (const token of blocks(unified(text))) fragment.append(...nodesOf(token));
  return fragment;
}

/**
 * A text that grows at its end. Blocks that can no longer change are never looked at again, so what an update costs
 * depends on the last blocks alone, not on the length of the answer.
 */
export class GrowingMarkdown {
  #element;
  #settled = 0; // characters of the text in front of the first block that may still change
  #live = []; // of those blocks, the raw text and the nodes

  constructor(element) {
    this.#element = element;
    element.replaceChildren();
  }

  /** Show `text`, which begins with what was shown before. Returns the text of the blocks that are complete now. */
  update(text) {
    const source = unified(text.endsWith("\r") ? text.slice(0, -1) : text);
    const tokens = blocks(source.slice(this.#settled));
    const before = this.#live;
    this.#live = tokens.map((token, at) => this.#drawn(token, before[at]));
    for (const { nodes } of before.slice(tokens.length)) nodes.forEach((node) => node.remove());
    return this.#settle(tokens);
  }

  /** The text is complete. Only links by reference, which may be defined last, need it drawn anew. */
  finish(text) {
    this.update(text);
    if (DEFINITION.test(text)) this.#element.replaceChildren(markdown(text));
  }

  #drawn(token, old) {
    if (old?.raw === token.raw && old.type === token.type) return old;
    if (old && extendCode(old, token)) return { ...old, raw: token.raw, text: token.text };
    const nodes = nodesOf(token);
    if (old?.nodes.length) {
      old.nodes[0].before(...nodes);
      old.nodes.forEach((node) => node.remove());
    } else {
      this.#element.append(...nodes);
    }
    return { type: token.type, raw: token.raw, text: token.text, language: token.lang, nodes };
  }

  /** Two blocks stay open: a list may go on after an empty line, until what follows is more than its first characters. */
  #settle(tokens) {
    const solid = tokens.flatMap((token, at) => (token.type === "space" ? [] : [at]));
    const keep = solid.at(-2) ?? 0;
    const settled = tokens.slice(0, keep);
    this.#settled += settled.reduce((sum, token) => sum + token.raw.length, 0);
    return this.#live.splice(0, keep).flatMap(({ nodes }) => nodes.map((node) => node.textContent)).join("\n");
  }
}

/** A code block that only became longer gets the rest appended: it may have thousands of lines. */
function extendCode(old, token) {
  if (token.type !== "code" || old.type !== "code" || old.language !== token.lang || !token.text.startsWith(old.text)) return false;
  const code = old.nodes[0].querySelector("code");
  const wanted = token.text + "\n";
  const shown = code.firstChild;
  if (!shown || !wanted.startsWith(shown.data.slice(0, -1))) return false;
  shown.replaceData(shown.length - 1, 1, wanted.slice(shown.length - 1));
  return true;
}

const unified = (text) => (text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text);

function blocks(text) {
  try {
    return marked.lexer(text);
  } catch {
    return [{ type: "text", raw: text, text, plain: true }]; // nested beyond what the parser can follow
  }
}

function nodesOf(token) {
  if (token.type === "space" || token.type === "def") return [];
  const fragment = token.plain ? plain(token.text) : safe(token);
  for (const pre of fragment.querySelectorAll("pre")) frameCode(pre);
  for (const table of fragment.querySelectorAll("table")) frameTable(table);
  return [...fragment.childNodes];
}

function safe(token) {
  try {
    return purifier.sanitize(marked.parser([token]), RULES);
  } catch {
    return plain(token.raw);
  }
}

function plain(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(Object.assign(document.createElement("p"), { className: "as-typed", textContent: text }));
  return fragment;
}

function frameCode(pre) {
  const language = pre.querySelector("code")?.className.replace("language-", "") ?? "";
  const frame = document.getElementById("t-code").content.cloneNode(true).firstElementChild;
  frame.querySelector("[data-language]").textContent = language;
  pre.tabIndex = 0;
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  pre.replaceWith(frame);
  frame.append(pre);
}

function frameTable(table) {
  const frame = Object.assign(document.createElement("div"), { className: "scroll-x", tabIndex: 0 });
  frame.setAttribute("role", "group");
  frame.setAttribute("aria-label", "Table");
  table.replaceWith(frame);
  frame.append(table);
}
