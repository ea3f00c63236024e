// Runs the checks of one client, and prints one JSON object per check, as checks.py does.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";

export const [URL, MODEL] = process.argv.slice(2);
export const QUESTION = "Tell me a story about a fox.";
export const MESSAGES = [{ role: "user", content: QUESTION }];
export const TEXTS = ["The fox found a kite.", "A bear swims.", "The fox found a red kite."];
const parameters = {
  type: "object",
  properties: { animal: { enum: ["fox", "bear"] }, count: { enum: [1, 2, 3] } },
  required: ["animal", "count"],
  additionalProperties: false,
};
export const TOOL = { type: "function", function: { name: "count_animals", description: "Count.", parameters } };

export function areNear([first, second, third]) {
  const product = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
  return product(first, third) > product(first, second);
}

export async function run(checks, packages) {
  for (const [check, act] of Object.entries(checks)) {
    let outcome = "wrong answer";
    try {
      if (await act()) outcome = "ok";
    } catch (error) {
      outcome = `${error.name}: ${error.message}`.slice(0, 300);
    }
    console.log(JSON.stringify({ check, outcome }));
  }
  console.log(JSON.stringify({ versions: packages.map((name) => `${name} ${versionOf(name)}`).join(", ") }));
}

function versionOf(name) {
  let folder = dirname(createRequire(import.meta.url).resolve(name));
  for (;;) {
    try {
      const description = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
      if (description.name === name) return description.version;
    } catch {} // no package.json here
    folder = dirname(folder);
  }
}
