// Puts the page together, and keeps its address in step with what it shows: ?model=… for the columns, #… for the
// conversation.

import { Announcer } from "./announcer.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { ConversationList } from "./conversations.js";
import { asJson, asMarkdown, MAX_COLUMNS, newConversation, settled } from "./conversation.js";
import { download } from "./dom.js";
import { Keeper } from "./keeper.js";
import { Models } from "./models.js";
import { togglePanel, uncover } from "./panels.js";
import { Settings } from "./sampling.js";
import { Screen } from "./screen.js";
import { showSnippet } from "./snippet.js";
import { ChatSocket } from "./socket.js";
import { Store } from "./store.js";
import { flash } from "../api.js";

const $ = (id) => document.getElementById(id);
const page = JSON.parse($("chat-data").textContent);
const STATES = {
  connecting: "Connecting…",
  waiting: "Connection lost. Connecting again…",
  "signed-out": "You are signed out.",
  refused: "The server refused the connection. Reload the page.",
  open: "",
};

const store = await Store.open(page.user, page.tenant).catch(() => null);
if (!store) $("chat-kept").textContent = "This browser keeps nothing, so conversations end with the page.";

const models = new Models(page);
const keeper = new Keeper(store, () => flash("warn", "This conversation could not be kept in the browser: there is no room left."));
const socket = new ChatSocket(socketUrl(page.socket), { onState: showState, signedOut });
const composer = new Composer($("chat-composer"), `chat-draft/${page.user}/${page.tenant}`, { ask, stop: () => chat.stop(), editLast: () => chat.isRunning || screen.editLast() });
const screen = new Screen({ models, composer, announcer: new Announcer($("chat-said")) });
const chat = new Chat(socket, keeper, screen);
const settings = new Settings($("chat-form"), changeSettings);
const list = new ConversationList({ list: $("chat-conversations"), search: $("chat-search"), clear: $("chat-clear") }, { onDelete: forget, onClear: forgetAll });

screen.chat = chat;
screen.actions = {
  pick,
  removeColumn,
  retry: (id, number) => chat.retry(id, number),
  shorten: (id, number) => chat.shorten(id, number),
  proceed: (id) => chat.proceed(id),
  edit: (number, text) => chat.edit(number, text),
  block: (text) => screen.sayBlock(text),
};

function socketUrl(path) {
  const url = new URL(path, location.href);
  url.protocol = url.protocol.replace("http", "ws");
  return url.href;
}

function showState(state) {
  $("chat-state").textContent = STATES[state];
  $("chat-state").dataset.state = state;
  if (state !== "signed-out") return;
  const link = Object.assign(document.createElement("a"), { textContent: "Sign in again", href: "/console/sign-in?next=" + encodeURIComponent(location.pathname + location.search) });
  $("chat-state").append(" ", link);
}

async function signedOut() {
  const response = await fetch("/console/api/me").catch(() => null);
  return response?.status === 401;
}

// what is asked

function ask(text) {
  if (!settings.isValid) {
    togglePanel($("chat-settings"), true);
    settings.reportInvalid();
    return false;
  }
  chat.ask(text);
  showAddress();
  showList();
  return true;
}

function changeSettings(changed) {
  chat.set(changed);
  showSettingsCount();
}

function showSettings() {
  settings.show(chat.conversation);
  showDefaults();
  showSettingsCount();
}

function showDefaults() {
  const [{ model }] = chat.conversation.columns;
  settings.showDefaults(models.defaultsOf(model), model);
}

function showSettingsCount() {
  const { system, sampling } = chat.conversation;
  const count = Object.keys(sampling).length + (system.trim() ? 1 : 0);
  $("chat-set").hidden = count === 0;
  $("chat-set").textContent = `${count} set`;
}

// columns

function pick(id, model) {
  chat.pick(id, model);
  screen.showModels();
  showDefaults();
  showAddress();
}

function compare() {
  const used = chat.conversation.columns.map(({ model }) => model);
  screen.addColumn(chat.addColumn(models.names.find((name) => !used.includes(name)) ?? "base"));
  showAddress();
}

function removeColumn(id) {
  chat.removeColumn(id);
  screen.removeColumn(id);
  showDefaults();
  showAddress();
}

// conversations

function showAddress() {
  const { id, columns, turns } = chat.conversation;
  const query = new URLSearchParams(columns.map(({ model }) => ["model", model]));
  history.replaceState(null, "", `?${query}${turns.length ? `#${id}` : ""}`);
}

async function open() {
  const id = location.hash.slice(1);
  const kept = id && store ? await store.load(id) : null;
  if (id !== location.hash.slice(1) || (id && id === chat.conversation?.id)) return; // somewhere else by now, or here already
  if (kept) for (const turn of kept.turns) for (const [column, answer] of Object.entries(turn.answers)) turn.answers[column] = settled(answer);
  chat.open(kept ?? newConversation(modelsOfAddress()));
  showSettings();
  showAddress();
  await showList();
  composer.focus();
}

function modelsOfAddress() {
  const asked = new URLSearchParams(location.search).getAll("model").filter(Boolean);
  const current = chat.conversation?.columns.map(({ model }) => model) ?? [];
  return [asked, current, ["base"]].find(({ length }) => length).slice(0, MAX_COLUMNS);
}

function begin() {
  history.pushState(null, "", location.pathname + location.search);
  uncover();
  return open();
}

async function showList() {
  keeper.flush();
  if (store) list.show(await store.list(), chat.conversation.id);
}

async function forget(id, title) {
  if (!confirm(`Delete “${title}”? It is kept nowhere else.`)) return;
  await keeper.forget(id);
  if (id === chat.conversation.id) await begin();
  await showList();
}

async function forgetAll() {
  if (!confirm("Delete all conversations? They are kept nowhere else.")) return;
  await keeper.forgetAll(chat.conversation.id);
  await begin();
}

function rename() {
  const dialog = $("chat-rename");
  dialog.querySelector("input").value = chat.conversation.title;
  dialog.returnValue = "";
  dialog.showModal();
  dialog.onclose = () => {
    if (dialog.returnValue !== "rename") return;
    chat.rename(dialog.querySelector("input").value.trim() || chat.conversation.title);
    screen.showTitle();
    showList();
  };
}

const fileName = (ending) => `${chat.conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").toLowerCase() || "conversation"}.${ending}`;

// the rest

/** What the first column would be asked next. */
function nextRequest() {
  const [column] = chat.conversation.columns;
  const request = chat.requestOf(column, chat.conversation.turns.length);
  return { ...request, messages: [...request.messages, { role: "user", content: composer.text || "Hello" }] };
}

const MENU = {
  code: () => showSnippet(nextRequest()),
  rename,
  markdown: () => download(fileName("md"), "text/markdown", asMarkdown(chat.conversation)),
  json: () => download(fileName("json"), "application/json", asJson(chat.conversation)),
  delete: () => forget(chat.conversation.id, chat.conversation.title),
};

document.addEventListener("click", ({ target }) => {
  const item = target.closest("[data-menu]");
  if (!item) return;
  $("chat-menu").open = false;
  MENU[item.dataset.menu]();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || screen.choosing || document.querySelector("dialog[open], details.menu[open]")) return;
  if (!uncover()) chat.stop();
});

$("chat-new").addEventListener("click", begin);
$("chat-compare").addEventListener("click", compare);
$("chat-conversations").addEventListener("click", ({ target }) => target.closest("a") && uncover());
addEventListener("popstate", open);

await open();
const known = () => {
  screen.refreshModels();
  showDefaults();
};
models.load(known).catch((error) => flash("warn", `The list of adapters could not be read: ${error.message} Names can be typed.`));
