// The chat page: a conversation with the model of this server. Text goes into the page through textContent alone.

import { rendered } from "./markdown.js";

const LIKELIEST = 10; // tokens beside each drawn one
const KEPT = "llamaspec"; // the name under which the browser keeps the conversation
const EXAMPLES = [
  "Tell me a story about a fox and a red kite.",
  "Tell me a story about a bear who learns to swim.",
  "Tell me a story about Anna and a carrot.",
];
const at = (id) => document.getElementById(id);
const MOST_ROOM = 512; // tokens of the context that are left for an answer, of a small one a quarter
const numbers = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

let turns = []; // {role, content, forgotten}, and for answers {thoughts, tokens, seed, note, error}
let context = Infinity; // tokens that a prompt and its answer may have
let running = null; // the AbortController of the answer that grows
let stories = false; // whether this is the built-in model
let shown = null; // {turn, index} of the token whose distribution is open

// ---- the server

function headers() {
  const key = at("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function refusal(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection was lost");
    held += value;
    for (let end; (end = held.indexOf("\n\n")) >= 0; held = held.slice(end + 2)) {
      const line = held.slice(0, end).split("\n").find((each) => each.startsWith("data: "));
      if (line === "data: [DONE]") return;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new Error(data.error.message);
      yield data;
    }
  }
}

function messagesOf(before) {
  const system = at("system").value.trim();
  const messages = before.filter((turn) => !turn.forgotten).map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

async function makeRoom(before, control) {
  // Forget the oldest turns as `llamaspec chat` does, if an answer has no room: until half of the context is free, since
  // what stays is read anew, or until one turn is left. Nothing goes where that does not help: the server then says why.
  const room = Math.min(MOST_ROOM, context / 4, Number(at("max_tokens").value) || Infinity);
  const tokens = async (from) => {
    const body = JSON.stringify({ messages: messagesOf(before.slice(from)) });
    const options = { method: "POST", headers: headers(), body, signal: control.signal };
    const response = await fetch("tokenize", options);
    return response.ok ? (await response.json()).count : NaN; // of which no comparison holds
  };
  const oldest = before.findIndex((turn) => !turn.forgotten);
  let from = oldest;
  let count = await tokens(from);
  if (!(count + room > context)) return;
  while (from + 2 < before.length && count > (from + 4 < before.length ? context / 2 : context - room)) {
    from += 2;
    count = await tokens(from);
  }
  if (from === oldest || !(count <= context)) return;
  for (const turn of before.slice(oldest, from)) turn.forgotten = true;
  draw();
}

function request(before, seed, prefix) {
  const messages = messagesOf(before);
  const options = {};
  for (const name of numbers) if (at(name).value !== "") options[name] = Number(at(name).value);
  const model = at("choice").value || undefined;
  const body = { model, messages, ...options, seed, stream: true, logprobs: true, top_logprobs: LIKELIEST };
  return prefix.length ? { ...body, answer_ids: prefix.map(({ id }) => id) } : body;
}

async function answer(index, { seed, prefix = [] } = {}) {
  // Draw turns[index] anew, from `prefix` on.
  const chosen = at("seed").value;
  seed ??= chosen === "" ? Math.floor(Math.random() * 2 ** 32) : Number(chosen);
  const turn = { role: "assistant", content: textOf(prefix), tokens: [...prefix], seed };
  turns = [...turns.slice(0, index), turn];
  const control = (running = new AbortController());
  draw();
  const began = performance.now();
  let first = 0;
  let last = 0;
  let later = 0; // tokens that came after the first ones
  let ended = "";
  try {
    await makeRoom(turns.slice(0, index), control);
    const body = JSON.stringify(request(turns.slice(0, index), seed, prefix));
    const options = { method: "POST", headers: headers(), body, signal: control.signal };
    const response = await fetch("v1/chat/completions", options);
    if (!response.ok) throw new Error(await refusal(response));
    for await (const { choices } of events(response)) {
      const choice = choices[0];
      if (!choice) continue;
      ended = choice.finish_reason ?? ended;
      if (choice.delta.reasoning_content) turn.thoughts = (turn.thoughts ?? "") + choice.delta.reasoning_content;
      if (choice.delta.content) turn.content += choice.delta.content;
      const drawn = choice.logprobs?.content ?? [];
      if (drawn.length) {
        last = performance.now();
        if (first) later += drawn.length;
        first ||= last;
      }
      turn.tokens.push(...drawn);
      grow(turn);
    }
  } catch (error) {
    if (control.signal.aborted) ended = "stopped";
    else turn.error = error.message;
  }
  if (running === control) running = null;
  const count = turn.tokens.length - prefix.length;
  turn.note = first ? note(count, (first - began) / 1000, later, (last - first) / 1000, ended) : "";
  keep();
  draw();
  return turn;
}

function note(count, wait, later, seconds, ended) {
  // Tokens come several at a time: of a few times nothing can be told.
  const rate = seconds > 0.05 ? `, then ${(later / seconds).toFixed(1)} tokens/s` : "";
  const cut = { length: ", cut by length", stopped: ", stopped" }[ended] ?? "";
  return `${count} token${count === 1 ? "" : "s"}, the first after ${wait.toFixed(2)} s${rate}${cut}`;
}

// ---- what is seen

function element(name, { text, kind, ...properties } = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  made.append(...children);
  return made;
}

function button(text, act) {
  return element("button", { text, type: "button", onclick: act });
}

function draw() {
  // Draw all turns. While an answer grows, `grow` adds to it.
  close();
  const place = at("conversation");
  place.replaceChildren();
  turns.forEach((turn, index) => {
    const said = element("div", { kind: "said" });
    const foot = element("div", { kind: "foot" });
    const busy = running && index === turns.length - 1 && turn.role === "assistant";
    const section = element("section", { kind: `turn ${turn.role}${busy ? " busy" : ""}` }, said, foot);
    section.setAttribute("aria-label", turn.role === "user" ? "You" : "Answer");
    if (turn.role === "user") {
      said.textContent = turn.content;
      if (!running) foot.append(button("Edit", () => edit(index)));
    } else {
      turn.folded = element("details", { kind: "thoughts", hidden: true }, element("summary"), element("div"));
      section.prepend(turn.folded);
      turn.place = said;
      said.classList.toggle("markdown", at("markdown").checked);
      Object.assign(turn, { drawn: 0, seen: 0, ends: [], decoder: new TextDecoder() });
      said.tabIndex = turn.tokens.length ? 0 : -1;
      said.onkeydown = (event) => walk(event, turn);
      grow(turn);
      if (turn.error) foot.append(element("span", { text: turn.error, kind: "error" }));
      if (!busy) {
        foot.append(element("span", { text: [turn.note, `seed ${turn.seed}`].filter(Boolean).join(" · ") }));
        if (turn.check) foot.append(element("span", { text: turn.check }));
      }
      if (!running && index === turns.length - 1) {
        foot.append(button("Regenerate", () => answer(index)), button("Same seed again", () => check(index)));
        foot.append(button("Copy", () => navigator.clipboard?.writeText(turn.content.trim())));
      }
    }
    if (turns[index - 1]?.forgotten && !turn.forgotten) {
      const text = `What is above was forgotten: the context of ${context.toLocaleString("en")} tokens was nearly full.`;
      place.append(element("p", { text, kind: "foot" }));
    }
    place.append(section);
  });
  if (!turns.length) place.append(welcome());
  at("send").hidden = Boolean(running);
  at("stop").hidden = !running;
  follow(true);
}

function welcome() {
  const examples = stories ? EXAMPLES.map((text) => button(text, () => send(text))) : [];
  const hint = stories
    ? "The built-in model tells stories, and answers questions about the one it told."
    : "Say something. Then hover over a word of the answer to see what else it might have been.";
  return element("div", { kind: "empty" }, element("p", { text: hint }), ...examples);
}

function grow(turn) {
  if (turn.thoughts) {
    const [title, text] = turn.folded.children;
    turn.folded.hidden = false;
    const thinks = running && turn === turns.at(-1) && !turn.content;
    title.textContent = thinks ? "Thinking…" : "Thoughts";
    text.textContent = turn.thoughts;
  }
  // Characters may be spread over tokens: each goes where its last byte is. A stop text may cut the last token.
  for (; turn.drawn < turn.tokens.length; turn.drawn++) {
    const bytes = Uint8Array.from(turn.tokens[turn.drawn].bytes);
    const text = turn.decoder.decode(bytes, { stream: true }).slice(0, turn.content.length - turn.seen);
    if (!at("markdown").checked) turn.place.append(...marked(turn, turn.drawn, text));
    turn.seen += text.length;
    turn.ends.push(turn.seen);
  }
  if (at("markdown").checked) paint(turn);
  speak(turn);
  follow(false);
}

function paint(turn) {
  // Draw an answer as Markdown: at once if it is complete, and otherwise with the browser's next frame.
  if (running && turn === turns.at(-1)) {
    turn.frame ||= requestAnimationFrame(() => {
      paintNow(turn);
      follow(false);
    });
  } else paintNow(turn);
}

function paintNow(turn) {
  cancelAnimationFrame(turn.frame);
  turn.frame = 0;
  let index = 0; // of the token at the latest piece of text
  const write = (text, start) => {
    if (start < 0) return [text];
    const nodes = [];
    const end = start + text.length;
    while (index && turn.ends[index - 1] > start) index--;
    for (let from = start; from < end; index++) {
      if (index >= turn.ends.length) return [...nodes, turn.content.slice(from, end)];
      const to = Math.min(turn.ends[index], end);
      if (to > from) nodes.push(...marked(turn, index, turn.content.slice(from, to)));
      from = Math.max(from, to);
      if (to === end) break;
    }
    return nodes;
  };
  turn.place.replaceChildren(rendered(turn.content, write));
  if (shown?.turn === turn) for (const mark of marks(turn, shown.index)) mark.classList.add("shown");
}

function marked(turn, index, text) {
  // Space in front stays without color, so that lines end cleanly.
  const rest = text.trimStart() || text;
  return [text.slice(0, text.length - rest.length), span(turn, index, rest)];
}

function textOf(tokens) {
  const decoder = new TextDecoder();
  return tokens.map(({ bytes }) => decoder.decode(Uint8Array.from(bytes), { stream: true })).join("");
}

function marks(turn, index) {
  return turn.place.querySelectorAll(`[data-token="${index}"]`);
}

function span(turn, index, text) {
  const made = element("span", { text, kind: "token" });
  made.dataset.token = index;
  made.style.setProperty("--doubt", 1 - Math.exp(turn.tokens[index].logprob));
  made.onmouseenter = () => open(turn, index);
  made.onclick = () => open(turn, index);
  return made;
}

function follow(always) {
  const bottom = document.documentElement.scrollHeight - window.innerHeight;
  if (always || bottom - window.scrollY < 120) window.scrollTo({ top: bottom });
}

function speak(turn) {
  // Screen readers hear sentences, not tokens.
  const end = Math.max(turn.content.lastIndexOf("."), turn.content.lastIndexOf("!"), turn.content.lastIndexOf("?"));
  if (running && end > (turn.spoken ?? -1)) {
    at("spoken").textContent = turn.content.slice((turn.spoken ?? -1) + 1, end + 1);
    turn.spoken = end;
  }
}

function open(turn, index) {
  close();
  const token = turn.tokens[index];
  const parts = marks(turn, index);
  if (!parts.length) return;
  shown = { turn, index };
  for (const part of parts) part.classList.add("shown");
  const odds = at("odds");
  // An answer cannot go on from another token where thoughts came before it, since only its own tokens are known.
  const last = turn === turns.at(-1) && !running && !turn.thoughts;
  const hint = last ? "Likeliest tokens here; click one to go on from it" : "Likeliest tokens here";
  odds.replaceChildren(element("p", { text: hint }));
  const likeliest = token.top_logprobs.some(({ id }) => id === token.id)
    ? token.top_logprobs
    : [...token.top_logprobs, token];
  for (const each of likeliest) {
    const share = Math.exp(each.logprob);
    const shownText = each.token.replaceAll("\n", "↵") || "·";
    const row = element(
      "button",
      { type: "button", kind: each.id === token.id ? "drawn" : "", disabled: !last },
      element("span", { text: shownText.replace(/^ /, "␣") }),
      element("span", { text: share < 0.0005 ? "<0.1 %" : `${(share * 100).toFixed(1)} %` }),
    );
    row.style.setProperty("--share", share);
    row.onclick = () => answer(turns.indexOf(turn), { seed: turn.seed, prefix: [...turn.tokens.slice(0, index), each] });
    odds.append(row);
  }
  odds.hidden = false;
  const box = parts[0].getClientRects()[0] ?? turn.place.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left - 8), window.innerWidth - odds.offsetWidth - 8);
  const below = box.bottom + odds.offsetHeight + 8 < window.innerHeight;
  odds.style.left = `${left}px`;
  odds.style.top = `${below ? box.bottom + 3 : Math.max(8, box.top - odds.offsetHeight - 3)}px`;
}

function close() {
  for (const part of document.querySelectorAll(".token.shown")) part.classList.remove("shown");
  at("odds").hidden = true;
  shown = null;
}

function walk(event, turn) {
  // Arrow keys go from token to token; Enter or the arrow down enters the list.
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const index = shown?.turn === turn ? shown.index : -1;
  if (step) {
    let next = index + step;
    while (next in turn.tokens && !marks(turn, next).length) next += step; // a token of markup alone is not shown
    if (next in turn.tokens) open(turn, next);
  }
  else if (index >= 0 && (event.key === "Enter" || event.key === "ArrowDown")) at("odds").querySelector("button")?.focus();
  else return;
  event.preventDefault();
}

// ---- what a person does

function send(text = at("question").value) {
  if (running || !text.trim()) return;
  turns = [...turns, { role: "user", content: text }];
  at("question").value = "";
  fit();
  answer(turns.length);
}

function edit(index) {
  at("question").value = turns[index].content;
  turns = turns.slice(0, index);
  keep();
  draw();
  fit();
  at("question").focus();
}

async function check(index) {
  const before = turns[index];
  const again = await answer(index, { seed: before.seed });
  if (again.error || again.note?.endsWith("stopped")) return;
  const same = again.content === before.content;
  again.check = same ? "✓ the same text again" : "✗ another text: the options have changed, or the first was cut";
  keep();
  draw();
}

function save() {
  const said = turns.map(({ role, content }) => ({ role, content }));
  const body = request(said, turns.at(-1)?.seed, []);
  delete body.stream;
  const file = new Blob([JSON.stringify(body, null, 2)], { type: "application/json" });
  const link = element("a", { href: URL.createObjectURL(file), download: "conversation.json" });
  link.click();
  URL.revokeObjectURL(link.href);
}

function keep() {
  const kept = turns.map(({ place, folded, drawn, seen, ends, frame, decoder, spoken, ...turn }) => turn);
  const stated = Object.fromEntries(["system", ...numbers].map((name) => [name, at(name).value]));
  const all = { turns: kept, stated, colors: at("colors").checked, markdown: at("markdown").checked };
  try {
    localStorage.setItem(KEPT, JSON.stringify(all));
    sessionStorage.setItem(`${KEPT}-key`, at("key").value);
  } catch {
    status("the browser keeps no more"); // The conversation goes on without.
  }
}

function restore() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT));
    turns = kept.turns;
    for (const [name, value] of Object.entries(kept.stated ?? {})) at(name).value = value;
    at("colors").checked = kept.colors;
    at("markdown").checked = kept.markdown ?? true;
    at("key").value = sessionStorage.getItem(`${KEPT}-key`) ?? "";
  } catch {
    turns = []; // Nothing was kept, or by an older page.
  }
}

function status(text) {
  at("status").textContent = text;
}

function fit() {
  const box = at("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function colors() {
  at("conversation").classList.toggle("colors", at("colors").checked);
}

async function begin() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await refusal(response));
    const models = (await response.json()).data; // the model, then its adapters
    const model = models[0];
    at("choice-label").hidden = models.length < 2;
    at("choice").replaceChildren(...models.map(({ id }) => new Option(id)));
    head(model.id);
    stories = model.id === "stories" && model.owned_by === "llamaspec";
    context = model.context;
    status(`${context.toLocaleString("en")} tokens`);
  } catch (error) {
    status(error.message);
    if (/key/.test(error.message)) settings(true);
  }
  draw();
}

function head(id) {
  at("model").textContent = document.title = id;
}

function settings(shownNow) {
  at("settings").hidden = !shownNow;
  at("toggle").setAttribute("aria-expanded", String(shownNow));
}

at("composer").onsubmit = (event) => {
  event.preventDefault();
  send();
};
at("settings").onsubmit = (event) => event.preventDefault();
at("settings").onchange = () => {
  colors();
  keep();
};
at("choice").onchange = () => head(at("choice").value);
at("markdown").onchange = draw;
at("key").onchange = () => {
  keep();
  begin();
};
at("question").oninput = fit;
at("question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
};
at("stop").onclick = () => running?.abort();
at("new").onclick = () => {
  running?.abort();
  turns = [];
  keep();
  draw();
  at("question").focus();
};
at("export").onclick = save;
at("toggle").onclick = () => settings(at("settings").hidden);
document.onkeydown = (event) => {
  if (event.key !== "Escape") return;
  if (shown) close();
  else running?.abort();
};
document.onclick = (event) => {
  if (shown && !event.target.closest(".token, #odds")) close();
};
document.addEventListener("mouseover", (event) => {
  if (shown && !event.target.closest(".token, #odds, .said")) close();
});

restore();
colors();
begin();
