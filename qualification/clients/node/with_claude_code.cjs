// Anthropic's Claude Code, over the Messages API.

const assert = require("node:assert");
const test = require("node:test");
const { folder, run, read } = require("./agent.cjs");

const VARIABLES = {
  ANTHROPIC_API_KEY: undefined,
  ANTHROPIC_AUTH_TOKEN: "none",
  ANTHROPIC_MODEL: "demo",
  ANTHROPIC_DEFAULT_HAIKU_MODEL: "demo",
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  DISABLE_AUTOUPDATER: "1",
};

test("a file is written", () => {
  const cwd = folder();
  const asked = ["-p", "Write made.txt.", "--permission-mode", "acceptEdits", "--output-format", "json"];
  const { status, said, log } = run("claude", asked, cwd, VARIABLES);
  assert.strictEqual(status, 0, said + log);
  const told = JSON.parse(said);
  assert.strictEqual(told.result, "It is written.");
  assert.strictEqual(told.num_turns, 2);
  assert.strictEqual(read(cwd, "made.txt"), "hello\n");
});
