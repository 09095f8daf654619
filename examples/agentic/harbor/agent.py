"""An agent that runs in the container of a task: it asks the policy once and writes the reply into a file."""

import json
import os
import sys
import urllib.request

given = json.load(sys.stdin)
request = urllib.request.Request(
    f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
    json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": given["messages"]}).encode(),
    {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
)
with urllib.request.urlopen(request) as response:
    reply = json.load(response)["choices"][0]["message"]["content"]
with open("/app/answer.txt", "w", encoding="utf-8") as file:
    file.write(reply.strip())
print("done")
