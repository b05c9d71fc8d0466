// What OpenAI's JavaScript client does with the service: `node exchanges.mjs CLIENT URL MODEL`. One JSON line each.
import OpenAI, { toFile } from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";
import { readFileSync } from "node:fs";

const [, , , url, model] = process.argv;
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello to Ann." }];
const parameters = { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] };
const need = (value) => {
  if (!value) throw new Error("not as promised");
};

const ways = {
  async chat() {
    need((await client.chat.completions.create({ model, messages, max_tokens: 20 })).choices[0].message.content);
  },
  async stream() {
    let text = "";
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 20, stream: true });
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    need(text);
  },
  async tools() {
    const tools = [{ type: "function", function: { name: "weather", parameters } }];
    const answer = await client.chat.completions.create({ model, messages, tools, tool_choice: "required", max_tokens: 100 });
    need("city" in JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
  },
  async structured() {
    const schema = { ...parameters, additionalProperties: false };
    const response_format = { type: "json_schema", json_schema: { name: "city", schema, strict: true } };
    const answer = await client.chat.completions.create({ model, messages, response_format, max_tokens: 200 });
    need("city" in JSON.parse(answer.choices[0].message.content));
  },
  async speech() {
    const answer = await client.audio.speech.create({ model, voice: "alloy", input: "Hello there." });
    need((await answer.arrayBuffer()).byteLength > 2000);
  },
  async transcription() {
    const said = await client.audio.speech.create({ model, voice: "alloy", input: "The cat sat.", response_format: "wav" });
    const file = await toFile(Buffer.from(await said.arrayBuffer()), "a.wav");
    need((await client.audio.transcriptions.create({ model, file })).text);
  },
  async picture() {
    need((await client.images.generate({ model, prompt: "a red fox" })).data[0].b64_json);
  },
  async realtime() {
    const socket = new OpenAIRealtimeWS({ model }, client);
    await new Promise((done, fail) => {
      socket.on("error", fail);
      socket.on("response.done", done);
      socket.on("session.created", () => {
        const content = [{ type: "input_text", text: "Hello" }];
        socket.send({ type: "conversation.item.create", item: { type: "message", role: "user", content } });
        socket.send({ type: "response.create", response: { max_output_tokens: 20 } });
      });
    });
    socket.close();
  },
};

if (url.startsWith("http:")) delete ways.realtime; // it knows wss:// alone: serve with --ssl-certfile
const version = JSON.parse(readFileSync("node_modules/openai/package.json")).version;
console.log(JSON.stringify({ version }));
for (const [way, run] of Object.entries(ways)) {
  let result = "ok";
  try {
    await run();
  } catch (error) {
    console.error(error);
    result = String(error).slice(0, 400);
  }
  console.log(JSON.stringify({ ways: { [way]: result } }));
}
process.exit(0);
