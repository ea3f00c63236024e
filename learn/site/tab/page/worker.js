// Runs Python, away from the page: the page can end it at any time, also in an endless loop. The first message has the
// files; each later one is a request for learn/site/tab/inside.py.
"use strict";

const HERE = "https://files.invalid/"; // Pyodide asks for files below this address, and gets those of the message
let answer;

async function start(files) {
  self.fetch = async (address) => {
    const name = new URL(address.url ?? address).pathname.slice(1);
    if (!(name in files)) throw new TypeError(`the page has no file ${name}`);
    const type = name.endsWith(".wasm") ? "application/wasm" : "application/octet-stream";
    return new Response(files[name], { headers: { "Content-Type": type } });
  };
  const python = await loadPyodide({ indexURL: HERE, env: { PYTHONDONTWRITEBYTECODE: "1" } });
  const version = python.runPython("import sys; f'python{sys.version_info.major}.{sys.version_info.minor}'");
  python.unpackArchive(files["site.zip"], "zip", { extractDir: `/lib/${version}/site-packages` });
  answer = python.pyimport("llamaspec.learn.site.tab.inside").answer;
  self.postMessage({ ready: true });
}

self.addEventListener("message", async ({ data }) => {
  try {
    if (data.files) await start(data.files);
    else {
      answer(JSON.stringify(data.request), (text) => self.postMessage(JSON.parse(text)));
      self.postMessage({ done: true });
    }
  } catch (error) {
    self.postMessage({ failed: String(error.message ?? error) });
  }
});
