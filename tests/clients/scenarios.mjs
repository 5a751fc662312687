// One scenario with the official `openai` package for Node; prints what happened as JSON.
//
//   node scenarios.mjs NAME
//
// OPENAI_BASE_URL, OPENAI_API_KEY and NODE_EXTRA_CA_CERTS say where and who.

import OpenAI from "openai";

const messages = [{ role: "user", content: "Hello" }];
const tools = [
  {
    type: "function",
    function: {
      name: "weather",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const client = new OpenAI({ maxRetries: 0, timeout: 20_000 });

const scenarios = {
  async chat() {
    const { data, request_id } = await client.chat.completions
      .create({ model: "tiny", messages, max_tokens: 8 }, { headers: { "x-request-id": "node-1" } })
      .withResponse();
    return { content: data.choices[0].message.content, usage: data.usage, request_id };
  },

  async stream() {
    const asked = { model: "pair", messages, max_tokens: 12, temperature: 0, seed: 1 };
    const whole = await client.chat.completions.create(asked);
    const stream = await client.chat.completions.create({
      ...asked,
      stream: true,
      stream_options: { include_usage: true },
    });
    let text = "";
    let usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    return { whole: whole.choices[0].message.content, text, usage };
  },

  async held() {
    const { MODEL: model, INTERIM: interim } = process.env;
    const headers = { "x-llmgw-interim": interim };
    const stream = await client.chat.completions.create({ model, messages, stream: true }, { headers });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
    return { text };
  },

  async tools() {
    const runner = client.chat.completions.stream({ model: "tiny", messages, tools, temperature: 0, seed: 1 });
    const { choices } = await runner.finalChatCompletion();
    return { finish_reason: choices[0].finish_reason, call: choices[0].message.tool_calls[0].function };
  },

  async choices() {
    const asked = { model: "pair", messages, n: 2, max_tokens: 4, logprobs: true, temperature: 0 };
    const { choices } = await client.chat.completions.create(asked);
    return choices.map(({ index, logprobs }) => [index, logprobs.content.length]);
  },

  async responses() {
    const whole = await client.responses.create({ model: "tiny", input: "Hello", max_output_tokens: 5 });
    const types = new Set();
    const stream = await client.responses.create({
      model: "tiny",
      input: "Hello",
      max_output_tokens: 5,
      stream: true,
    });
    for await (const event of stream) types.add(event.type);
    return { text: whole.output_text, types: [...types] };
  },

  async embeddings() {
    const asked = { model: "embed", input: ["fast", "soup"] };
    const packed = await client.embeddings.create(asked); // base64 on the wire
    const numbers = await client.embeddings.create({ ...asked, encoding_format: "float" });
    const [a, b] = [packed, numbers].map(({ data }) => data[0].embedding);
    return { sizes: [a.length, b.length], apart: Math.max(...b.map((value, at) => Math.abs(value - a[at]))) };
  },

  async models() {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    const one = await client.models.retrieve("gpt-4o-mini");
    return { ids, one: one.id, strange: await refusal(() => client.models.retrieve("org/model")) };
  },

  async errors() {
    const stranger = new OpenAI({ apiKey: "sk-wrong", maxRetries: 0 });
    const long = [{ role: "user", content: "harbour ".repeat(4000) }];
    const ask = (openai, fields) => openai.chat.completions.create({ model: "tiny", messages, ...fields });
    return {
      unknown: await refusal(() => ask(client, { model: "gpt-9" })),
      stranger: await refusal(() => ask(stranger, {})),
      long: await refusal(() => ask(client, { messages: long })),
    };
  },

  // Started while every slot is busy.
  async retry() {
    const patient = new OpenAI({ maxRetries: 8, timeout: 20_000 });
    const answer = await patient.chat.completions.create({ model: "big", messages, max_tokens: 1 });
    return { content: answer.choices[0].message.content };
  },

  async abort() {
    const stream = await client.completions.create({ model: "big", prompt: "The", stream: true, ignore_eos: true });
    let seen = 0;
    for await (const _ of stream) if (++seen === 3) stream.controller.abort();
    const again = await client.completions.create({ model: "big", prompt: "The", max_tokens: 1 });
    return { seen, again: again.choices[0].text };
  },
};

async function refusal(call) {
  try {
    await call();
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code, type: error.type };
  }
  return null;
}

console.log(JSON.stringify(await scenarios[process.argv[2]]()));
