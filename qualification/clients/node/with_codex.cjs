// OpenAI's Codex CLI, over the Responses API.

const assert = require("node:assert");
const test = require("node:test");
const { folder, run, read } = require("./agent.cjs");

function settings(model) {
  return `
model = "${model}"
model_provider = "warmroute"
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.warmroute]
name = "warmroute"
base_url = "${process.env.OPENAI_BASE_URL}"
wire_api = "responses"
env_key = "WARMROUTE_API_KEY"
`;
}

function writes(model, asked) {
  const cwd = folder({ ".codex/config.toml": settings(model) });
  const variables = { CODEX_HOME: `${cwd}/.codex`, WARMROUTE_API_KEY: "none" };
  const { status, said, log } = run("codex", ["exec", asked], cwd, variables);
  assert.strictEqual(status, 0, log);
  assert.strictEqual(read(cwd, "made.txt"), "hello\n", log);
  assert.match(said, /It is written\./);
}

// To a model that it does not know it offers functions, functions in a namespace, and tools of OpenAI's servers.
test("a file is written by a command", () => writes("demo", "Write made.txt by a command."));
// To a model that it knows it also offers a custom tool with a grammar.
test("a file is written by a patch", () => writes("gpt-5.5", "Write made.txt by a patch."));
