// Runs an agent as a user would, in a new folder, with no way to the internet.

const { spawnSync } = require("node:child_process");
const fs = require("node:fs");
const path = require("node:path");

const OFFLINE = { HTTP_PROXY: "http://127.0.0.1:9", HTTPS_PROXY: "http://127.0.0.1:9", NO_PROXY: "127.0.0.1" };
const LIMIT_MS = 120_000;

function folder(files = {}) {
  const made = fs.mkdtempSync(path.join(process.env.HOME, "work-"));
  spawnSync("git", ["init", "-q"], { cwd: made });
  for (const [name, text] of Object.entries(files)) {
    fs.mkdirSync(path.dirname(path.join(made, name)), { recursive: true });
    fs.writeFileSync(path.join(made, name), text);
  }
  return made;
}

function run(program, args, cwd, variables = {}) {
  const command = path.join(process.env.NODE_PATH, ".bin", program);
  const env = { ...process.env, ...OFFLINE, ...variables };
  delete env.NODE_TEST_CONTEXT;
  const ended = spawnSync(command, args, { cwd, env, timeout: LIMIT_MS, encoding: "utf8", stdio: ["ignore", "pipe", "pipe"] });
  return { status: ended.status, said: ended.stdout, log: ended.stderr };
}

function read(cwd, name) {
  const file = path.join(cwd, name);
  return fs.existsSync(file) ? fs.readFileSync(file, "utf8") : null;
}

module.exports = { folder, run, read };
