// Anthropic's own client in JavaScript.

const assert = require("node:assert");
const test = require("node:test");
const { default: Anthropic, NotFoundError, BadRequestError } = require("@anthropic-ai/sdk");
const { zodOutputFormat } = require("@anthropic-ai/sdk/helpers/zod");
const { betaZodTool } = require("@anthropic-ai/sdk/helpers/beta/zod");
const { z } = require("zod");

const model = process.env.MODEL;
const client = new Anthropic({ maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];
const short = { model, messages, max_tokens: 20 };
const long = { model, messages, max_tokens: 300 };
const input_schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 40 }, unit: { enum: ["C", "F"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
const tools = [{ name: "get_weather", description: "The weather.", input_schema }];
const named = { type: "tool", name: "get_weather" };

test("models", async () => {
  const listed = [];
  for await (const found of client.models.list()) listed.push(found.id);
  assert.deepStrictEqual(listed, [model]);
  const one = await client.models.retrieve(model);
  assert.deepStrictEqual([one.type, one.display_name], ["model", model]);
  assert.ok(new Date(one.created_at) <= new Date());
});

test("message and stream of it", async () => {
  const whole = await client.messages.create({ ...short, system: "Be kind." });
  assert.strictEqual(whole.content[0].type, "text");
  assert.ok(whole.usage.output_tokens > 0);
  const stream = client.messages.stream(short);
  let said = "";
  stream.on("text", (text) => (said += text));
  const final = await stream.finalMessage();
  assert.strictEqual(final.content[0].text, said);
  assert.ok(["end_turn", "max_tokens"].includes(final.stop_reason));
});

test("count of tokens", async () => {
  const counted = await client.messages.countTokens({ model, messages });
  const { usage } = await client.messages.create(short);
  assert.strictEqual(counted.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens ?? 0));
});

for (const tool_choice of [{ type: "any" }, named]) {
  test(`tool with the choice ${tool_choice.type}`, async () => {
    const first = await client.messages.create({ ...long, tools, tool_choice });
    const [call] = first.content;
    assert.deepStrictEqual([first.stop_reason, call.type, call.name], ["tool_use", "tool_use", "get_weather"]);
    assert.ok(["C", "F"].includes(call.input.unit));
    const streamed = await client.messages.stream({ ...long, tools, tool_choice }).finalMessage();
    assert.ok(["C", "F"].includes(streamed.content[0].input.unit));
    const result = { type: "tool_result", tool_use_id: call.id, content: "12 C" };
    const said = [...messages, { role: "assistant", content: first.content }, { role: "user", content: [result] }];
    assert.ok((await client.messages.create({ ...short, messages: said, tools })).content.length > 0);
  });
}

test("tool runner", async () => {
  const inputSchema = z.object({});
  const clock = betaZodTool({ name: "get_time", description: "The time.", inputSchema, run: () => "noon" });
  const asked = { model, messages, max_tokens: 200, tools: [clock], tool_choice: { type: "any" }, max_iterations: 2 };
  const answers = [];
  for await (const answer of client.beta.messages.toolRunner(asked)) answers.push(answer.stop_reason);
  assert.deepStrictEqual([answers.length, answers[0]], [2, "tool_use"]);
});

test("parsed message", async () => {
  const Person = z.object({ name: z.string(), mood: z.enum(["good", "bad"]) });
  const answer = await client.messages.parse({ ...long, output_config: { format: zodOutputFormat(Person) } });
  assert.ok(["good", "bad"].includes(answer.parsed_output.mood));
});

test("errors", async () => {
  await assert.rejects(client.messages.create({ ...short, model: "other" }), NotFoundError);
  await assert.rejects(client.messages.create({ ...short, max_tokens: -1 }), BadRequestError);
});
