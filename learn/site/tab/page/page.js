// The page: it unpacks its parts, starts a worker with Python, sends requests to it and shows what comes back.
"use strict";

const TOKENS = 120;
const id = (name) => document.getElementById(name);
const packed = {}; // the parts of the page by name, each a file: compressed, then in base64
const edits = new Map(); // what the reader has written, by the item of the list
const solved = new Set();
let files = null; // the unpacked parts
let worker = null;
let items = {}; // definitions and exercises, by the value of their option
let handlers = null; // what to do with messages of the request that runs

function part(name, text) {
  packed[name] = text;
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

function say(text) {
  id("state").textContent = text;
}

async function load() {
  say("Unpacking Python and NumPy.");
  files = {};
  for (const [name, text] of Object.entries(packed)) {
    files[name] = await unpacked(text);
    delete packed[name];
  }
  await start();
  await request({ do: "contents" }, { definitions: (message) => list(message) });
  id("what").disabled = false;
  await choose();
  document.documentElement.dataset.ready = "";
}

// Start a worker, which takes a few seconds, and wait until Python runs in it.
function start() {
  say("Starting Python.");
  const scripts = Object.keys(files).filter((name) => name.endsWith(".js"));
  const address = URL.createObjectURL(new Blob(scripts.map((name) => files[name]), { type: "text/javascript" }));
  worker = new Worker(address);
  URL.revokeObjectURL(address);
  return new Promise((resolve, reject) => {
    worker.onmessage = ({ data }) => {
      if (data.ready) {
        worker.onmessage = receive;
        idle();
        resolve();
      } else {
        say(`Python did not start: ${data.failed}`);
        reject(new Error(data.failed));
      }
    };
    const data = Object.entries(files).filter(([name]) => !name.endsWith(".js") || name === "pyodide.asm.js");
    worker.postMessage({ files: Object.fromEntries(data) });
  });
}

function receive({ data }) {
  if (data.done || data.failed) {
    const { finish } = handlers;
    handlers = null;
    if (data.failed) verdict({ lines: [data.failed], solved: false });
    finish();
    return;
  }
  for (const [key, handle] of Object.entries(handlers.by)) if (key in data) handle(data);
}

// Send a request; `by` maps a key of a message to the function that gets the message.
function request(fields, by) {
  return new Promise((finish) => {
    handlers = { by, finish };
    worker.postMessage({ request: fields });
  });
}

function idle() {
  say("Ready: no network is needed any more.");
  id("run").disabled = id("restore").disabled = false;
  id("stop").disabled = true;
  id("progress").hidden = true;
}

function busy() {
  say("Running.");
  id("run").disabled = true;
  id("stop").disabled = false;
}

function list({ definitions, exercises }) {
  const groups = new Map();
  const add = (group, value, text, item) => {
    if (!groups.has(group)) {
      groups.set(group, document.createElement("optgroup"));
      groups.get(group).label = group;
      id("what").append(groups.get(group));
    }
    groups.get(group).append(new Option(text, value));
    items[value] = item;
  };
  for (const item of definitions) add("Definitions", item.op, `${item.op} in ${item.file}`, item);
  for (const item of exercises) {
    add(`Lab: ${item.chapter}`, `lab-${item.number}`, `${item.number} ${item.title}`, item);
  }
}

async function choose() {
  const value = id("what").value;
  const item = items[value];
  if (item.number && item.source === undefined) {
    await request({ do: "exercise", number: item.number }, { exercise: (message) => Object.assign(item, message) });
  }
  if (value !== id("what").value) return;
  id("title").textContent = item.number ? `Exercise ${item.number}: ${item.title}` : "";
  id("file").textContent = item.number ? "kernel.py" : item.file;
  id("source").value = edits.get(value) ?? item.source;
  id("run").textContent = item.number ? "Check" : "Run";
  id("stories").hidden = Boolean(item.number);
  id("help").hidden = !item.number;
  for (const name of ["contract", "hint", "solution"]) {
    id(name).textContent = item[name] ?? "";
    id(name).closest("details").open = false;
    id(name).closest("details").hidden = !item[name];
  }
  for (const name of ["story", "rate", "verdict"]) id(name).textContent = "";
  delete id("verdict").dataset.solved;
}

function verdict({ lines, solved: right }) {
  id("verdict").textContent = lines.join("\n");
  if (right !== undefined) id("verdict").dataset.solved = right;
}

function progress({ examples, of }) {
  id("progress").hidden = false;
  id("progress").max = of;
  id("progress").value = examples;
}

function story({ text, story: whole, tokens, rate }) {
  if (text !== undefined) id("story").textContent += text;
  if (whole !== undefined) id("story").textContent = whole; // a character may be spelt by several tokens
  if (tokens) id("rate").textContent = `${tokens} tokens, ${rate.toFixed(0)} tokens/s`;
}

async function run() {
  const value = id("what").value;
  const item = items[value];
  const source = id("source").value;
  busy();
  for (const name of ["story", "rate", "verdict"]) id(name).textContent = "";
  delete id("verdict").dataset.solved;
  const runner = worker;
  if (item.number) {
    const check = { do: "check_exercise", number: item.number, source };
    await request(check, { lines: verdict, examples: progress });
    if (id("verdict").dataset.solved === "true" && !solved.has(value)) {
      solved.add(value);
      id("what").selectedOptions[0].text += " ✓";
    }
  } else {
    const prompt = id("prompt").value;
    await request({ do: "tell", op: item.op, source, prompt, tokens: TOKENS }, {
      text: story, story, lines: verdict,
    });
    if (runner === worker && !id("verdict").textContent) {
      await request({ do: "verify_definition", op: item.op, source }, { lines: verdict, examples: progress });
    }
  }
  if (runner === worker) idle();
}

// End the worker, whatever it computes, and start another.
async function stop() {
  worker.terminate();
  const { finish } = handlers;
  handlers = null;
  id("stop").disabled = true;
  id("progress").hidden = true;
  verdict({ lines: ["Stopped."] });
  const starting = start();
  finish();
  await starting;
}

id("source").addEventListener("input", () => edits.set(id("what").value, id("source").value));
id("what").addEventListener("change", choose);
id("run").addEventListener("click", run);
id("stop").addEventListener("click", stop);
id("restore").addEventListener("click", () => {
  edits.delete(id("what").value);
  id("source").value = items[id("what").value].source;
});
window.addEventListener("load", load);
