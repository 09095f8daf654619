#!/bin/bash
case "$(cat /app/answer.txt 2>/dev/null)" in
  9) reward=1 ;;
  [0-9]) reward=0.2 ;;
  *) reward=0 ;;
esac
echo $reward > /logs/verifier/reward.txt
