"""Where activations wait for their backward pass: annotations, the policies that apply them, the proof."""
