"""The only place where data becomes public: clip, sum, sample, noise, release."""
