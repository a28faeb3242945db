// OpenAI's own client in JavaScript.

const assert = require("node:assert");
const test = require("node:test");
const OpenAI = require("openai");
const { zodResponseFormat, zodTextFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const model = process.env.MODEL;
const client = new OpenAI({ maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];
const Person = z.object({ name: z.string(), age: z.number().int(), mood: z.enum(["good", "bad"]) });
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 40 }, unit: { enum: ["C", "F"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];

function isWeather(text) {
  return ["C", "F"].includes(JSON.parse(text).unit);
}

test("models", async () => {
  const listed = [];
  for await (const found of client.models.list()) listed.push(found.id);
  assert.deepStrictEqual(listed, [model]);
});

test("chat and stream of it", async () => {
  const asked = { model, messages, max_completion_tokens: 20, seed: 1 };
  const whole = await client.chat.completions.create(asked);
  assert.ok(whole.choices[0].message.content && whole.usage.completion_tokens > 0);
  let said = "";
  let usage = null;
  const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) {
    said += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.strictEqual(said, whole.choices[0].message.content);
  assert.strictEqual(usage.completion_tokens, whole.usage.completion_tokens);
});

test("stream helper of chat", async () => {
  const stream = client.chat.completions.stream({ model, messages, max_completion_tokens: 20 });
  const final = await stream.finalChatCompletion();
  assert.ok(final.choices[0].message.content);
});

test("a stream that its client leaves", async () => {
  const stream = await client.chat.completions.create({ model, messages, max_completion_tokens: 500, stream: true });
  for await (const _ of stream) break;
  assert.ok(stream.controller.signal.aborted);
});

for (const tool_choice of ["required", { type: "function", function: { name: "get_weather" } }]) {
  test(`tool that is ${tool_choice.type ? "named" : tool_choice}`, async () => {
    const answer = await client.chat.completions.create({ model, messages, tools, tool_choice });
    assert.ok(isWeather(answer.choices[0].message.tool_calls[0].function.arguments));
    const streamed = await client.chat.completions.stream({ model, messages, tools, tool_choice }).finalChatCompletion();
    assert.ok(isWeather(streamed.choices[0].message.tool_calls[0].function.arguments));
  });
}

test("parsed chat", async () => {
  const response_format = zodResponseFormat(Person, "person");
  const answer = await client.chat.completions.parse({ model, messages, response_format });
  assert.ok(["good", "bad"].includes(answer.choices[0].message.parsed.mood));
});

test("response and stream of it", async () => {
  const asked = { model, input: "Hello", max_output_tokens: 20 };
  assert.ok((await client.responses.create(asked)).output_text);
  const kinds = [];
  const stream = client.responses.stream(asked);
  for await (const event of stream) kinds.push(event.type);
  assert.strictEqual(kinds[0], "response.created");
  assert.ok((await stream.finalResponse()).output_text);
});

test("response after a response", async () => {
  const first = await client.responses.create({ model, input: "Hello", max_output_tokens: 10 });
  const asked = { model, input: "And?", max_output_tokens: 10, previous_response_id: first.id };
  assert.ok((await client.responses.create(asked)).usage.input_tokens > first.usage.input_tokens);
  assert.strictEqual((await client.responses.retrieve(first.id)).output_text, first.output_text);
});

test("parsed response", async () => {
  const text = { format: zodTextFormat(Person, "person") };
  const answer = await client.responses.parse({ model, input: "Hello", text });
  assert.strictEqual(typeof answer.output_parsed.name, "string");
});

test("tool of a response and its result", async () => {
  const offered = [{ type: "function", name: "get_weather", parameters, strict: true }, { type: "web_search" }];
  const first = await client.responses.create({ model, input: "Hello", tools: offered, tool_choice: "required" });
  const [call] = first.output;
  assert.ok(isWeather(call.arguments));
  const result = { type: "function_call_output", call_id: call.call_id, output: "12 C" };
  const asked = { model, input: [result], previous_response_id: first.id, tools: offered, max_output_tokens: 10 };
  assert.ok((await client.responses.create(asked)).output_text);
});

test("custom tool of a response and its result", async () => {
  const offered = [{ type: "custom", name: "patch", description: "Patch a file." }];
  const tool_choice = { type: "custom", name: "patch" };
  const stream = client.responses.stream({ model, input: "Hello", tools: offered, tool_choice, max_output_tokens: 200 });
  let said = "";
  for await (const event of stream) if (event.type === "response.custom_tool_call_input.delta") said += event.delta;
  const first = await stream.finalResponse();
  const [call] = first.output;
  assert.deepStrictEqual([call.type, call.name, call.input], ["custom_tool_call", "patch", said]);
  const result = { type: "custom_tool_call_output", call_id: call.call_id, output: "done" };
  const asked = { model, input: [result], previous_response_id: first.id, tools: offered, max_output_tokens: 10 };
  assert.ok((await client.responses.create(asked)).output_text);
});

test("errors", async () => {
  const asked = { model, messages };
  await assert.rejects(client.chat.completions.create({ ...asked, model: "other" }), { status: 404, code: "model_not_found" });
  await assert.rejects(client.chat.completions.create({ ...asked, temperature: -1 }), OpenAI.BadRequestError);
});
