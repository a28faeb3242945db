// opencode, over the chat API.

const assert = require("node:assert");
const test = require("node:test");
const { folder, run, read } = require("./agent.cjs");

const PROVIDER = {
  npm: "@ai-sdk/openai-compatible",
  options: { baseURL: process.env.OPENAI_BASE_URL, apiKey: "none" },
  models: { demo: { name: "demo", limit: { context: 262144, output: 4096 } } },
};
const SETTINGS = {
  model: "warmroute/demo",
  small_model: "warmroute/demo",
  autoupdate: false,
  share: "disabled",
  provider: { warmroute: PROVIDER },
};
const VARIABLES = {
  OPENCODE_DISABLE_AUTOUPDATE: "1",
  OPENCODE_DISABLE_DEFAULT_PLUGINS: "1",
  OPENCODE_DISABLE_LSP_DOWNLOAD: "1",
  OPENCODE_DISABLE_MODELS_FETCH: "1",
};

test("a file is written", () => {
  const cwd = folder({ "opencode.json": JSON.stringify(SETTINGS) });
  const { status, said, log } = run("opencode", ["run", "Write made.txt."], cwd, VARIABLES);
  assert.strictEqual(status, 0, log);
  assert.strictEqual(read(cwd, "made.txt"), "hello\n", log);
  assert.match(said, /It is written\./);
});
