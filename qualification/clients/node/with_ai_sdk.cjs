// Vercel's AI SDK, over chat as an endpoint that is compatible, and over OpenAI's chat and responses.

const assert = require("node:assert");
const test = require("node:test");
const { generateObject, generateText, stepCountIs, streamObject, streamText, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const name = process.env.MODEL;
const compatible = createOpenAICompatible({ name: "warmroute", baseURL, apiKey, supportsStructuredOutputs: true, includeUsage: true });
const openai = createOpenAI({ baseURL, apiKey });
const models = { compatible: compatible(name), chat: openai.chat(name), responses: openai.responses(name) };
const schema = z.object({ name: z.string().max(40), age: z.number().int(), mood: z.enum(["good", "bad"]) });
const weather = tool({
  description: "The weather.",
  inputSchema: z.object({ city: z.string().max(40), unit: z.enum(["C", "F"]) }),
  execute: async ({ unit }) => `12 ${unit}`,
});
const settled = { prompt: "Hello", maxRetries: 0 };

for (const [api, model] of Object.entries(models)) {
  test(`${api}: text`, async () => {
    const answer = await generateText({ ...settled, model, system: "Be kind.", maxOutputTokens: 20 });
    assert.ok(answer.text && answer.usage.outputTokens > 0);
  });

  test(`${api}: stream of text`, async () => {
    const answer = streamText({ ...settled, model, maxOutputTokens: 20 });
    let said = "";
    for await (const text of answer.textStream) said += text;
    assert.ok(said && said === (await answer.text));
    assert.ok((await answer.usage).outputTokens > 0);
  });

  test(`${api}: object`, async () => {
    const { object } = await generateObject({ ...settled, model, schema });
    assert.ok(["good", "bad"].includes(object.mood));
  });

  test(`${api}: stream of an object`, async () => {
    const answer = streamObject({ ...settled, model, schema });
    const parts = [];
    for await (const part of answer.partialObjectStream) parts.push(part);
    assert.deepStrictEqual(parts.at(-1), await answer.object);
  });

  test(`${api}: tools in two steps`, async () => {
    const asked = { ...settled, model, tools: { weather }, maxOutputTokens: 200, stopWhen: stepCountIs(2) };
    const first = { prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: "none" } : { toolChoice: "required" }) };
    const whole = await generateText({ ...asked, ...first });
    assert.strictEqual(whole.steps.length, 2);
    assert.match(whole.steps[0].toolResults[0].output, /^12 [CF]$/);
    const streamed = streamText({ ...asked, ...first });
    const kinds = new Set();
    for await (const part of streamed.fullStream) {
      assert.notStrictEqual(part.type, "error", String(part.error));
      kinds.add(part.type);
    }
    assert.ok(kinds.has("tool-input-delta") && kinds.has("tool-result"));
    assert.match((await streamed.steps)[0].toolResults[0].output, /^12 [CF]$/);
  });

  test(`${api}: conversation`, async () => {
    const first = await generateText({ ...settled, model, maxOutputTokens: 10 });
    const hello = { role: "user", content: "Hello" };
    const messages = [hello, ...first.response.messages, { role: "user", content: "And?" }];
    const then = await generateText({ model, maxRetries: 0, messages, maxOutputTokens: 10 });
    assert.ok(then.text && then.usage.inputTokens > first.usage.inputTokens);
  });

  test(`${api}: named tool`, async () => {
    const asked = { ...settled, model, tools: { weather }, toolChoice: { type: "tool", toolName: "weather" } };
    const answer = await generateText({ ...asked, maxOutputTokens: 200 });
    assert.match(answer.toolResults[0].output, /^12 [CF]$/);
  });

  test(`${api}: error`, async () => {
    const asked = { ...settled, model, temperature: -1 };
    await assert.rejects(generateText(asked), { statusCode: 400 });
  });
}
