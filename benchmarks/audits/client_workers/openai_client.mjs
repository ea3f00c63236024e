// OpenAI's client for JavaScript.

import OpenAI from "openai";
import { MESSAGES, MODEL, TEXTS, TOOL, URL, areNear, run } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const chat = (options = {}) =>
  client.chat.completions.create({ model: MODEL, messages: MESSAGES, seed: 7, max_tokens: 150, ...options });
const textOf = (answer) => answer.choices[0].message.content;

await run(
  {
    chat: async () => textOf(await chat()),
    "stream equals the answer": async () => {
      let text = "";
      for await (const chunk of await chat({ stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
      return text === textOf(await chat());
    },
    "tool call, and its result": async () => {
      const { message } = (await chat({ tools: [TOOL], tool_choice: "required" })).choices[0];
      const [call] = message.tool_calls;
      const messages = [...MESSAGES, message, { role: "tool", tool_call_id: call.id, content: "done" }];
      await chat({ messages, tools: [TOOL], max_tokens: 5 });
      return ["fox", "bear"].includes(JSON.parse(call.function.arguments).animal);
    },
    embeddings: async () =>
      areNear((await client.embeddings.create({ model: MODEL, input: TEXTS })).data.map(({ embedding }) => embedding)),
    "error names the field": async () => {
      try {
        await chat({ top_p: 9 });
      } catch (error) {
        return error.status === 400 && error.param === "top_p";
      }
    },
  },
  ["openai"],
);
