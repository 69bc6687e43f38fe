// Reads the workflows of a repository as GitHub does, with its own parser: `node check.mjs REPOSITORY`. Called workflows are followed.
// What it says is wrong ends the program with 1. It knows the schema, expressions and their contexts; it starts nothing.
import fs from "fs";
import path from "path";
import {convertWorkflowTemplate, NoOperationTraceWriter, parseWorkflow} from "@actions/workflow-parser";

const DEPTH = 4; // as many calls as GitHub follows
const STRICT = 1; // ErrorPolicy.TryConversion: tell all errors
const root = process.argv[2];
const folder = path.join(root, ".github", "workflows");
const files = {
  async getFileContent(reference) {
    const name = reference.path ?? reference;
    return {name, content: fs.readFileSync(path.join(root, name), "utf8")};
  },
};

// What is wrong with a workflow, and its jobs.
async function read(name) {
  const content = fs.readFileSync(path.join(folder, name), "utf8");
  const parsed = parseWorkflow({name: `.github/workflows/${name}`, content}, new NoOperationTraceWriter());
  const errors = parsed.context.errors.getErrors().map(each => each.message);
  if (!parsed.value || errors.length) return {errors: errors.length ? errors : [`${name}: is empty`], jobs: []};
  const options = {fetchReusableWorkflowDepth: DEPTH, errorPolicy: STRICT};
  const template = await convertWorkflowTemplate(parsed.context, parsed.value, files, options);
  errors.push(...(template.errors ?? []).map(each => each.Message ?? each.message ?? String(each)));
  const jobs = (template.jobs ?? []).map(job => job.id.value + (job.jobs ? `(${job.jobs.map(each => each.id.value).join(" ")})` : ""));
  return {errors: errors.length || jobs.length ? errors : [`${name}: has no jobs`], jobs};
}

async function main() {
  for (const name of fs.readdirSync(folder).filter(each => /\.ya?ml$/.test(each)).sort()) {
    const {errors, jobs} = await read(name);
    if (errors.length) process.exitCode = 1;
    console.log(errors.length ? errors.join("\n") : `${name}: ${jobs.join(" ")}`);
  }
}

main();
