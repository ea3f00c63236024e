// The AI SDK, with its provider for servers that are compatible with OpenAI's.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { MODEL, QUESTION, TEXTS, URL, areNear, run } from "./checks.mjs";

const provider = createOpenAICompatible({
  name: "llamaspec",
  baseURL: `${URL}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const settings = { model: provider.chatModel(MODEL), prompt: QUESTION, seed: 7, maxOutputTokens: 150, maxRetries: 0 };
const animals = z.object({ animal: z.enum(["fox", "bear"]), count: z.enum(["one", "two"]) });

await run(
  {
    chat: async () => (await generateText(settings)).text,
    "stream equals the answer": async () => {
      let text = "";
      for await (const piece of streamText(settings).textStream) text += piece;
      return text === (await generateText(settings)).text;
    },
    "object by a schema": async () => animals.parse((await generateObject({ ...settings, schema: animals })).object),
    "tool call": async () => {
      const tools = { count_animals: tool({ description: "Count.", inputSchema: animals }) };
      const { toolCalls } = await generateText({ ...settings, tools, toolChoice: "required" });
      return animals.parse(toolCalls[0].input);
    },
    embeddings: async () =>
      areNear((await embedMany({ model: provider.textEmbeddingModel(MODEL), values: TEXTS })).embeddings),
  },
  ["ai", "@ai-sdk/openai-compatible"],
);
