// Calls of the admin API as the person who is signed in.

export class ApiError extends Error {
  constructor(status, error) {
    super(error.message);
    Object.assign(this, { status, code: error.code, param: error.param, details: error });
  }
}

const csrf = () => document.querySelector('meta[name="csrf"]')?.content ?? "";

/** The JSON that `/console/api` + path answers. Throws ApiError with `code`, `param` and all `details`. */
export async function api(path, { method = "GET", body, headers = {}, signal } = {}) {
  const asJson = body !== undefined && !(body instanceof Blob) && !(body instanceof FormData);
  const response = await fetch("/console/api" + path, {
    method,
    signal,
    headers: { ...(method === "GET" ? {} : { "x-csrf-token": csrf() }), ...(asJson ? { "content-type": "application/json" } : {}), ...headers },
    body: asJson ? JSON.stringify(body) : body,
  });
  if (response.status === 401) location.assign("/console/sign-in?next=" + encodeURIComponent(location.pathname + location.search));
  const answer = response.status === 204 ? null : await response.json().catch(() => null);
  if (!response.ok) throw new ApiError(response.status, answer?.error ?? { message: `The server answered ${response.status}.` });
  return answer;
}

/** A line above the content; `kind` is ok, info, warn or bad. */
export function flash(kind, text) {
  const line = document.createElement("div");
  line.className = `flash flash-${kind}`;
  line.append(Object.assign(document.createElement("span"), { textContent: text }));
  document.querySelector(".flashes").replaceChildren(line);
  line.scrollIntoView({ block: "nearest" });
}
